"""The model that a training run left."""

from pathlib import Path

import jax.numpy as jnp
from checkpoints import load_model
from flax import nnx
from mesh import create
from run_directory import read_config

from gla_layers import LanguageModel, LanguageModelConfig, ShardingConfig

ANYWHERE = ShardingConfig()


def read_model_config(run_dir: Path) -> LanguageModelConfig:
    """The architecture of the model of a run.

    Raises:
        ValueError: there is no run, or none of a model.
    """
    model = read_config(run_dir)["model"]
    try:
        return LanguageModelConfig(**model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{run_dir / 'run.json'} must tell of a model, but: {error}") from error


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
    model_config = read_model_config(run_dir)
    dtype = dtype or read_config(run_dir).get("dtype")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"{run_dir / 'run.json'} must tell of a dtype, but has {dtype!r}")
    model = create(
        lambda: LanguageModel(
            model_config,
            dtype=jnp.dtype(dtype),
            sharding=sharding,
            implementation=implementation,
            rngs=nnx.Rngs(0),
        )
    )
    return model, load_model(run_dir / "checkpoints", model)
