"""The model that a training run left."""

from pathlib import Path

import jax.numpy as jnp
from checkpoints import load_model
from flax import nnx
from run_directory import read_config

from gla_layers import LanguageModel, LanguageModelConfig


def load_trained(run_dir: Path) -> tuple[LanguageModel, int]:
    """A model of the newest checkpoint of a run, and that checkpoint's step.

    Raises:
        ValueError: there is no run, or no checkpoint that can be read.
    """
    config = read_config(run_dir)
    model = LanguageModel(
        LanguageModelConfig(**config["model"]),
        dtype=jnp.dtype(config["dtype"]),
        rngs=nnx.Rngs(0),
    )
    return model, load_model(run_dir / "checkpoints", model)
