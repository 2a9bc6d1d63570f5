"""Layers of another library, recorded in float64, and their parameters' names in this one."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gla_layers import KDA, GatedDeltaNet, SimpleGLA

from .mixers import fill

DATA = pathlib.Path(__file__).parents[1] / "data"
LAYERS = {"gdn": GatedDeltaNet, "kda": KDA, "sgla": SimpleGLA}
OPTIONS = {"output_gate_activation": "gate_activation"}
MODULES = {"g_norm_swish_gate": "o_norm", "0": "down", "1": "up"}


@dataclasses.dataclass(frozen=True)
class Golden:
    """A layer with the recorded parameters, and the recorded arrays by name."""

    layer: nnx.Module
    arrays: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> jax.Array:
        return jnp.asarray(self.arrays[name])

    @property
    def segment_ids(self) -> jax.Array | None:
        """The recorded packing or padding in this library's notation."""
        if "attention_mask" in self.arrays:
            return self["attention_mask"]
        if "cu_seqlens" in self.arrays:
            tokens = np.arange(self.arrays["x"].shape[1])
            ids = np.searchsorted(self.arrays["cu_seqlens"], tokens, side="right")
            return jnp.asarray(ids[None], jnp.int32)
        return None

    def gradients(self) -> dict[tuple[str, ...], np.ndarray]:
        """The recorded gradient of every parameter, by the parameter's path here."""
        return _by_path(self.arrays, "grad/")


def load(name: str, **options) -> Golden:
    arrays = dict(np.load(DATA / f"{name}.npz"))
    config = json.loads(str(arrays.pop("config")))
    config = {OPTIONS.get(option, option): value for option, value in config.items()}
    kind = LAYERS[name.split("_")[0]]
    layer = nnx.eval_shape(lambda: kind(**config, **options, rngs=nnx.Rngs(0)))
    recorded = _by_path(arrays, "param/")
    parameters = nnx.to_flat_state(nnx.state(layer))
    assert {path: x.shape for path, x in recorded.items()} == {
        path: p.shape for path, p in parameters
    }
    return Golden(fill(layer, lambda path, p: recorded[path]), arrays)


def _by_path(arrays, prefix):
    return dict(
        _translate(name.removeprefix(prefix), x)
        for name, x in arrays.items()
        if name.startswith(prefix)
    )


def _translate(name, x):
    *modules, leaf = name.split(".")
    path = tuple(MODULES.get(module, module) for module in modules)
    if leaf != "weight":
        return (*path, leaf), x
    if path[-1] == "o_norm":
        return (*path, "scale"), x
    return (*path, "kernel"), (x[:, 0] if x.ndim == 3 else x).T


def error(actual, expected) -> float:
    """Largest difference over the largest expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
