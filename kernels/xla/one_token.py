"""One token of any of the recurrences in plain JAX.

With the notation of `../tpu/one_token.py`. The backward pass is autodiff's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..implementation import Implementation, Options
from .chunks import l2norm

HIGHEST = jax.lax.Precision.HIGHEST


def forward(
    options: Options, tokens: tuple[Array, ...], states: Float[Array, "B 1 HV K V"], *_: None
) -> tuple[tuple[Float[Array, "B 1 HV V"], Float[Array, "B 1 HV K V"]], dict[str, Array]]:
    """The outputs and the new states, and nothing for the backward pass."""
    q, k, v, g, *beta = (x[:, 0].astype(jnp.float32) for x in tokens)
    if options.qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    batch, heads = k.shape[:2]

    def grouped(x: Array) -> Array:
        return x.reshape(batch, heads, -1, *x.shape[2:])

    def read(states: Array, x: Array) -> Array:
        return jnp.einsum("bhgkv,bhk->bhgv", states, x, precision=HIGHEST)

    decay = jnp.exp(jnp.where(g > 0, 0, g)).reshape(*g.shape[:2], -1, 1)
    decayed = grouped(decay * states[:, 0])
    written = grouped(v)
    if beta:
        written = grouped(*beta)[..., None] * (written - read(decayed, k))
    new_states = decayed + k[:, :, None, :, None] * written[..., None, :]
    o = read(new_states, options.scale * q)
    return (
        o.reshape(v.shape)[:, None].astype(tokens[2].dtype),
        new_states.reshape(states.shape),
    ), {}


def backward(
    options: Options,
    tokens: tuple[Array, ...],
    states: Float[Array, "B 1 HV K V"],
    packing: None,
    chunk_document: None,
    residuals: dict[str, Array],
    *cotangents: Array,
) -> tuple[Any, Float[Array, "B 1 HV K V"]]:
    """The gradients of tokens and states."""
    _, vjp = jax.vjp(lambda *inputs: forward(options, *inputs)[0], tokens, states)
    return vjp(cotangents)


implementation = Implementation(forward, backward)
