"""The model that a training run left."""

from pathlib import Path

import jax.numpy as jnp
from checkpoints import load_model
from flax import nnx
from mesh import create
from run_directory import read_config

from gla_layers import LanguageModel, LanguageModelConfig, ShardingConfig

ANYWHERE = ShardingConfig()


def load_trained(
    run_dir: Path,
    sharding: ShardingConfig = ANYWHERE,
    *,
    dtype: str | None = None,
    implementation: str | None = None,
) -> tuple[LanguageModel, int]:
    """A model of the newest checkpoint of a run, and that checkpoint's step.

    Args:
        run_dir: the run.
        sharding: the layout on the mesh in context, which need not be the run's.
        dtype: of the computation; the run's by default.
        implementation: of the mixers' ops; the best for the platform by default.

    Raises:
        ValueError: there is no run, or no checkpoint that can be read.
    """
    config = read_config(run_dir)
    model = create(
        lambda: LanguageModel(
            LanguageModelConfig(**config["model"]),
            dtype=jnp.dtype(dtype or config["dtype"]),
            sharding=sharding,
            implementation=implementation,
            rngs=nnx.Rngs(0),
        )
    )
    return model, load_model(run_dir / "checkpoints", model)
