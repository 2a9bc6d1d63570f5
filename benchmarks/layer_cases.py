"""Layers, and blocks around them, at the shapes that the benchmarks measure."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gla_layers import KDA, GatedDeltaNet, RMSNorm, SimpleGLA, SwiGLU
from gla_layers.language_model import Block
from gla_layers.state import TokenMixer

from .splash_attention import SplashAttention

HIDDEN, HEADS, HEAD, INTERMEDIATE = 2048, 16, 128, 5632


class MixerBlock(nnx.Module):
    """A block of a `LanguageModel`: a mixer and a SwiGLU, each after a norm and added to x."""

    def __init__(
        self,
        hidden_size: int,
        *,
        mixer: Callable[..., TokenMixer],
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.block = Block(
            mixer(hidden_size, dtype=dtype, rngs=rngs),
            SwiGLU(hidden_size, INTERMEDIATE, dtype=dtype, rngs=rngs),
            RMSNorm(hidden_size, rngs=rngs),
            RMSNorm(hidden_size, rngs=rngs),
            post_norm=False,
        )

    def __call__(self, x: jax.Array, *, segment_ids: jax.Array | None = None) -> jax.Array:
        return self.block(x, None, segment_ids)[0]


LAYERS: dict[str, Callable[..., Any]] = {
    "GatedDeltaNet": functools.partial(GatedDeltaNet, num_heads=HEADS, head_dim=HEAD, expand_v=1),
    "KDA": functools.partial(KDA, num_heads=HEADS, head_dim=HEAD),
    "SimpleGLA": functools.partial(SimpleGLA, num_heads=HEADS),
    "attention": functools.partial(SplashAttention, num_heads=HEADS),
}
LAYERS |= {
    f"{name} block": functools.partial(MixerBlock, mixer=mixer) for name, mixer in LAYERS.items()
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer over one row.

    Attributes:
        layer: a name in `LAYERS`.
        length: tokens.
        documents: documents of equal length that the row is packed of; 0 for no packing.
    """

    layer: str
    length: int
    documents: int = 0

    def program(self, *, backward: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to compile, and its arguments without arrays."""
        make = functools.partial(LAYERS[self.layer], HIDDEN, dtype=jnp.bfloat16)
        graph, parameters = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
        x = jax.ShapeDtypeStruct((1, self.length, HIDDEN), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((1, self.length), jnp.int32) if self.documents else None

        def forward(parameters, x, ids):
            return nnx.merge(graph, parameters)(x, segment_ids=ids)

        def forward_and_backward(parameters, x, ids, dy):
            y, vjp = jax.vjp(lambda parameters, x: forward(parameters, x, ids), parameters, x)
            return y, vjp(dy)

        if backward:
            return forward_and_backward, (parameters, x, ids, x)
        return forward, (parameters, x, ids)

    def residual_bytes(self, policy: Callable[..., bool] | None = None) -> int:
        """What the backward pass keeps, a token, beside x and what has a parameter's shape.

        Args:
            policy: of `jax.checkpoint`; None for none.
        """
        function, (parameters, x, ids) = self.program(backward=False)
        if policy is not None:
            function = jax.checkpoint(function, policy=policy)

        def kept(parameters, x, ids):
            return jax.vjp(lambda *arrays: function(*arrays, ids), parameters, x)[1]

        shapes = {array.shape for array in jax.tree.leaves(parameters)}
        arrays = jax.tree.leaves(jax.eval_shape(kept, parameters, x, ids))
        num_bytes = sum(a.size * a.dtype.itemsize for a in arrays if a.shape not in shapes)
        return (num_bytes - x.size * x.dtype.itemsize) // self.length
