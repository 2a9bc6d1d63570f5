"""The gated RMS norm in plain JAX.

Heads lie side by side on the last axis, as matrix products make and take them. A view of x as
[..., heads, size] has another layout on a TPU, and what is broadcast along it goes through memory:
so a head's mean, and its way back to the channels, are products with a matrix of ones and zeros.
With 16 heads of 128 on a v6e, forward and backward take 0.30 of the cycles of the plain form.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST


def forward(
    activation: Callable[[Array], Array],
    epsilon: float,
    x: Float[Array, "*batch heads*D"],
    gate: Float[Array, "*batch heads*D"] | None,
    scale: Float[Array, " D"],
) -> Float[Array, "*batch heads*D"]:
    """The outputs, in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    size = scale.shape[0]
    heads = x.shape[-1] // size
    head_of = jnp.repeat(jnp.eye(heads, dtype=wide.dtype), size, axis=0)
    mean_square = jnp.dot(wide * wide, head_of, precision=HIGHEST) / size
    inverse = jax.lax.rsqrt(mean_square + epsilon)
    y = wide * jnp.dot(inverse, head_of.T, precision=HIGHEST) * jnp.tile(scale, heads)
    if gate is not None:
        y = y * activation(gate.astype(wide.dtype))
    return y.astype(x.dtype)


def backward(
    activation: Callable[[Array], Array],
    epsilon: float,
    x: Float[Array, "*batch heads*D"],
    gate: Float[Array, "*batch heads*D"] | None,
    scale: Float[Array, " D"],
    dy: Float[Array, "*batch heads*D"],
) -> tuple[Float[Array, "*batch heads*D"], Float[Array, "*batch heads*D"] | None, Array]:
    """The gradients of x, gate and scale, which computes the outputs anew."""
    _, vjp = jax.vjp(functools.partial(forward, activation, epsilon), x, gate, scale)
    return vjp(dy)
