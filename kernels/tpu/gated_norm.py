"""The gated RMS norm on a Pallas TPU kernel each way.

Per token and head, with a = act(gate), or 1 without a gate:

    r = (mean(x^2) + epsilon)^(-1/2)      n = r x        y = scale a n

    dn     = scale a dy                   dx = r (dn - n mean(n dn))
    dgate  = act'(gate) scale n dy        dscale = sum over tokens and heads of a n dy

Heads lie side by side on the lanes. A kernel works on one at a time, or on as many small ones as
share a register: the mean of one is then a product with a matrix of blocks of ones. All is float32
in between; only x and the gate are saved. Tokens do not meet but in dscale, for which those past
the end are cleared.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..numerics import storage_dtype
from .blocks import LANES
from .call import pallas_call
from .dots import dot
from .token_blocks import TokenBlocks

LARGEST_HEAD = 512


def has_kernel(x: Float[Array, "*batch H*D"], scale: Float[Array, " D"]) -> bool:
    """Whether heads fill registers or evenly share them, and x needs no reshaping or float64."""
    size = scale.shape[0]
    whole = x.shape[-1] % LANES == 0 and (size % LANES == 0 or LANES % size == 0)
    return whole and size <= LARGEST_HEAD and x.ndim == 3 and x.size > 0 and x.dtype != jnp.float64


def forward(
    activation: Callable[[Array], Array],
    epsilon: float,
    x: Float[Array, "B T H*D"],
    gate: Float[Array, "B T H*D"] | None,
    scale: Float[Array, " D"],
) -> Float[Array, "B T H*D"]:
    """The outputs, in x's dtype."""
    size = scale.shape[0]
    tokens = _tokens(x)
    blocks = TokenBlocks.of(tokens, group=max(size, LANES))

    def body(x, gate, scale, y):
        @blocks.each_strip
        def _(strip):
            for lanes in blocks.groups():
                n, _ = _normalize(x[strip, lanes], size, epsilon)
                result = scale[...] * n
                if gate is not None:
                    result *= activation(gate[strip, lanes].astype(jnp.float32))
                y[strip, lanes] = result.astype(y.dtype)

    y = pallas_call(
        body,
        grid=blocks.grid,
        in_specs=[
            blocks.tokens(),
            None if gate is None else blocks.tokens(),
            pl.BlockSpec((1, blocks.group), lambda b, d, t: (0, 0)),
        ],
        out_specs=blocks.tokens(),
        out_shape=jax.ShapeDtypeStruct(tokens.shape, tokens.dtype),
        compiler_params=blocks.compiler_params,
        name="gated_norm_forward",
    )(tokens, _tokens(gate), _scale_of_group(scale, blocks))
    return _restore(y, x)


def backward(
    activation: Callable[[Array], Array],
    epsilon: float,
    x: Float[Array, "B T H*D"],
    gate: Float[Array, "B T H*D"] | None,
    scale: Float[Array, " D"],
    dy: Float[Array, "B T H*D"],
) -> tuple[Float[Array, "B T H*D"], Float[Array, "B T H*D"] | None, Float[Array, " D"]]:
    """The gradients of x, gate and scale, the last in float32."""
    size = scale.shape[0]
    tokens, gates = _tokens(x), _tokens(gate)
    blocks = TokenBlocks.of(tokens, tokens if gate is None else gates, group=max(size, LANES))
    gate_blocks = None if gate is None else blocks.tokens()

    def body(x, gate, scale, dy, dx, dgate, dscale):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            dscale[...] = jnp.zeros_like(dscale)

        @blocks.each_strip
        def _(strip):
            def read(ref, lanes):
                return blocks.clear(step, strip, ref[strip, lanes]).astype(jnp.float32)

            for lanes in blocks.groups():
                n, r = _normalize(read(x, lanes), size, epsilon)
                dn = read(dy, lanes)
                if gate is not None:
                    a, vjp = jax.vjp(activation, read(gate, lanes))
                    (da,) = vjp(scale[...] * n * dn)
                    dgate[strip, lanes] = da.astype(dgate.dtype)
                    dn *= a
                dscale[:, lanes] += jnp.sum(n * dn, axis=0, keepdims=True)
                dn *= scale[...]
                dx[strip, lanes] = (r * (dn - n * _mean(n * dn, size))).astype(dx.dtype)

    dx, dgate, dscale = pallas_call(
        body,
        grid=blocks.grid,
        in_specs=[
            blocks.tokens(),
            gate_blocks,
            pl.BlockSpec((1, blocks.group), lambda b, d, t: (0, 0)),
            blocks.tokens(),
        ],
        out_specs=[blocks.tokens(), gate_blocks, blocks.per_row(1)],
        out_shape=[
            jax.ShapeDtypeStruct(tokens.shape, tokens.dtype),
            None if gate is None else jax.ShapeDtypeStruct(gates.shape, gates.dtype),
            jax.ShapeDtypeStruct((blocks.batch, 1, blocks.channels), jnp.float32),
        ],
        compiler_params=blocks.compiler_params,
        name="gated_norm_backward",
    )(tokens, gates, _scale_of_group(scale, blocks), _tokens(dy))
    dscale = jnp.sum(dscale.reshape(-1, size), axis=0).astype(scale.dtype)
    return _restore(dx, x), _restore(dgate, gate), dscale


def _tokens(x):
    return None if x is None else x.astype(storage_dtype(x))


def _restore(y, x):
    return None if x is None else y.astype(x.dtype)


def _scale_of_group(scale, blocks):
    """The scale of every channel of a group."""
    return jnp.tile(scale.astype(jnp.float32), blocks.group // scale.shape[0])[None]


def _normalize(x, size, epsilon):
    """n and r."""
    x = x.astype(jnp.float32)
    r = jax.lax.rsqrt(_mean(x * x, size) + epsilon)
    return r * x, r


def _mean(x, size):
    """Over each head's channels, in all of them."""
    if size >= LANES:
        return jnp.mean(x, axis=1, keepdims=True)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), i) for i in (0, 1))
    ones = (row // size == column // size).astype(jnp.bfloat16)
    return dot(x, ones) / size
