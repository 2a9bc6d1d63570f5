"""Small token mixers of every kind, and calls of them that compile once a shape."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gla_layers import KDA, Attention, GatedDeltaNet, LatentAttention, SimpleGLA

HIDDEN = 16
MAX_LENGTH = 32
CLASSES: dict[str, Callable[..., nnx.Module]] = {
    "gdn": functools.partial(GatedDeltaNet, HIDDEN, num_heads=1, num_v_heads=2, head_dim=8),
    "kda": functools.partial(KDA, HIDDEN, num_heads=1, num_v_heads=2, head_dim=8),
    "sgla": functools.partial(SimpleGLA, HIDDEN, num_heads=2, num_kv_heads=1),
    "attention": functools.partial(Attention, HIDDEN, num_heads=2, num_kv_heads=1),
    "latent": functools.partial(
        LatentAttention, HIDDEN, num_heads=2, kv_rank=6, head_dim=8, shared_head_dim=4
    ),
}
LINEAR = ("gdn", "kda", "sgla")
MIXERS = tuple(CLASSES)


def make(name: str, **options) -> nnx.Module:
    """A mixer with normal parameters: initializers, called one by one, take seconds to compile."""
    layer = nnx.eval_shape(lambda: CLASSES[name](**options, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    return fill(layer, lambda path, p: rng.normal(size=p.shape, scale=HIDDEN**-0.5))


def fill(
    layer: nnx.Module, value: Callable[[tuple[str, ...], nnx.Param], np.ndarray]
) -> nnx.Module:
    """The abstract layer with `value(path, parameter)` for every parameter."""
    graph, state = nnx.split(layer)
    flat = nnx.to_flat_state(state)
    filled = [(path, p.replace(jnp.asarray(value(path, p), p.dtype))) for path, p in flat]
    return nnx.merge(graph, nnx.from_flat_state(filled))


@functools.cache
def mixer(name: str) -> nnx.Module:
    """A mixer that no test changes."""
    return make(name)


@functools.cache
def inputs(batch: int, length: int, dtype: str = "float32") -> jax.Array:
    x = np.random.default_rng(0).normal(size=(batch, length, HIDDEN))
    return jnp.asarray(x, dtype)


@jax.jit
def run(layer, x, state=None, segment_ids=None):
    return layer(x, state=state, segment_ids=segment_ids)


def empty_state(layer: nnx.Module, batch: int):
    return layer.init_state(batch, MAX_LENGTH)


def difference(actual, expected) -> float:
    """Largest difference between two trees over the largest value of the expected one's array."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        if b.size == 0:
            return 0.0
        return float(np.max(np.abs(a - b))) / max(float(np.max(np.abs(b))), 1e-30)

    return max(jax.tree.leaves(jax.tree.map(one, actual, expected)), default=0.0)
