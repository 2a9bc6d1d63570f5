"""The short convolution on a Pallas TPU kernel each way.

With the taps s = 0 .. W - 1, x and history as one sequence, and u_s,t = x_(t-s) where token t sees
s tokens before it, else 0:

    z_t  = bias + sum_s kernel[W-1-s] u_s,t                 y = act(z)
    p_t  = act'(z_t) dy_t
    dx_t = sum_s kernel[W-1-s] p_(t+s)                      over t + s that see t
    dkernel[W-1-s] = sum_t p_t u_s,t                        dbias = sum_t p_t

All is float32 in between. Only x is saved: the backward computes z anew. It walks through time in
reverse, and what a block's tokens give to the tokens before it waits in vector memory; what is left
after the first block is the gradient of the history.

The tokens before a block are a second block of x, of `HALO` tokens, or the history. Tokens past the
end can reach the gradients only, and are cleared for those.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..numerics import storage_dtype
from .blocks import LANES, SUBLANES
from .call import pallas_call
from .token_blocks import HALO, STRIP, TokenBlocks


def has_kernel(x: Float[Array, "B T D"], kernel: Float[Array, "W D"]) -> bool:
    """Whether a register holds the history, and there is something to compute, in float32."""
    return x.size > 0 and x.dtype != jnp.float64 and kernel.shape[0] - 1 <= SUBLANES


def forward(
    activation: Callable[[Array], Array],
    dtype: jnp.dtype,
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    history: Float[Array, "B W-1 D"] | None,
    visible: Int[Array, "B T"] | None,
) -> Float[Array, "B T D"]:
    """The outputs, in `dtype`."""
    y = jax.ShapeDtypeStruct(x.shape, dtype)
    blocks = TokenBlocks.of(x, y)
    width = kernel.shape[0]

    def body(x, halo, history, kernel, bias, visible, y, rows):
        time = pl.program_id(2)
        edge = jnp.where(time == 0, history[...], halo[...])

        @blocks.each_strip
        def _(strip):
            seen = _seen(visible, strip)
            for group, lanes in enumerate(blocks.groups()):
                before = _before(blocks, time, x, edge, strip, lanes)
                taps = _taps(rows.at[group], before, x[strip, lanes], seen, width)
                z = _weighted(taps, kernel[:, lanes], bias, lanes)
                y[strip, lanes] = activation(z).astype(y.dtype)

    return pallas_call(
        body,
        grid=blocks.grid,
        in_specs=_specs(blocks, width, bias, visible),
        out_specs=blocks.tokens(),
        out_shape=y.update(dtype=storage_dtype(y)),
        scratch_shapes=[blocks.strips(SUBLANES)],
        compiler_params=blocks.compiler_params,
        name="short_convolution_forward",
    )(*_operands(x, kernel, bias, history, visible)).astype(dtype)


def backward(
    activation: Callable[[Array], Array],
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    history: Float[Array, "B W-1 D"] | None,
    visible: Int[Array, "B T"] | None,
    dy: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T D"], Float[Array, "W D"], Float[Array, " D"], Float[Array, "B W-1 D"]]:
    """The gradients of x, kernel, bias and history, all but the first in float32."""
    blocks = TokenBlocks.of(x, dy, reverse=True)
    width = kernel.shape[0]

    def body(
        x,
        halo,
        history,
        kernel,
        bias,
        visible,
        dy,
        dx,
        dhistory,
        sums,
        later,
        rows,
        p_rows,
        seen_rows,
    ):
        step = pl.program_id(2)
        time = blocks.time(step)
        edge = jnp.where(time == 0, history[...], halo[...])

        @pl.when(step == 0)
        def _():
            later[...] = jnp.zeros_like(later)
            sums[...] = jnp.zeros_like(sums)

        @blocks.each_strip
        def _(strip):
            seen = _seen(visible, strip)
            seen_later = _shifted(seen_rows, seen, width)
            for group, lanes in enumerate(blocks.groups()):
                weights = kernel[:, lanes]
                before = _before(blocks, time, x, edge, strip, lanes)
                tokens = blocks.clear(time, strip, x[strip, lanes])
                taps = _taps(rows.at[group], before, tokens, seen, width)
                z = _weighted(taps, weights, bias, lanes)
                _, vjp = jax.vjp(activation, z)
                (p,) = vjp(blocks.clear(time, strip, dy[strip, lanes]).astype(jnp.float32))
                products = [p * tap for tap in reversed(taps)] + [p]
                sums[:, lanes] += jnp.concatenate(
                    [jnp.sum(x, axis=0, keepdims=True) for x in products]
                )
                later_p = _shifted(p_rows.at[group], p, width)
                given = _weighted(map(_where_seen, seen_later, range(width), later_p), weights)
                end = given[-SUBLANES:] + later[:, lanes]
                given, later[:, lanes] = given[SUBLANES:-SUBLANES], given[:SUBLANES]
                dx[strip, lanes] = jnp.concatenate([given, end]).astype(dx.dtype)

        dhistory[...] = later[...]

    channels = x.shape[2]
    dx, dhistory, sums = pallas_call(
        body,
        grid=blocks.grid,
        in_specs=[*_specs(blocks, width, bias, visible), blocks.tokens()],
        out_specs=[blocks.tokens(), blocks.per_row(SUBLANES), blocks.per_row(width + 1)],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, storage_dtype(x)),
            jax.ShapeDtypeStruct((x.shape[0], SUBLANES, channels), jnp.float32),
            jax.ShapeDtypeStruct((x.shape[0], width + 1, channels), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((SUBLANES, blocks.lanes), jnp.float32),
            blocks.strips(SUBLANES),
            blocks.strips(2 * SUBLANES),
            pltpu.VMEM((STRIP + 2 * SUBLANES, LANES), jnp.int32),
        ],
        compiler_params=blocks.compiler_params,
        name="short_convolution_backward",
    )(*_operands(x, kernel, bias, history, visible), dy.astype(storage_dtype(dy)))
    sums = jnp.sum(sums, axis=0)
    return dx.astype(x.dtype), sums[:-1], sums[-1], dhistory[:, SUBLANES - (width - 1) :]


def _specs(blocks, width, bias, visible):
    return [
        blocks.tokens(),
        blocks.halo(),
        blocks.per_row(HALO),
        blocks.shared(width),
        None if bias is None else blocks.shared(1),
        None if visible is None else blocks.numbers(),
    ]


def _operands(x, kernel, bias, history, visible):
    batch, _, channels = x.shape
    x = x.astype(storage_dtype(x))
    if history is None:
        history = jnp.zeros((batch, 0, channels))
    history = jnp.pad(history.astype(x.dtype), ((0, 0), (HALO - history.shape[1], 0), (0, 0)))
    return (
        x,
        x,
        history,
        kernel.astype(jnp.float32),
        None if bias is None else bias.astype(jnp.float32)[None],
        None if visible is None else visible.astype(jnp.int32)[:, None],
    )


def _seen(visible, strip):
    """How many tokens each token of a strip sees, along the sublanes, in every lane."""
    if visible is None:
        return None
    return jnp.broadcast_to(visible[:, strip], (LANES, strip.size)).T


def _before(blocks, time, x, edge, strip, lanes):
    """The tokens before a strip: of the block, or before it."""
    end = pl.ds(pl.multiple_of(jnp.maximum(strip.start - HALO, 0), HALO), HALO)
    inside = blocks.clear(time, end, x[end, lanes])
    return jnp.where(strip.start == 0, edge[:, lanes], inside)


def _taps(row, before, x, seen, width):
    """u_s of a block, for every s."""
    x = x.astype(jnp.float32)
    row[:SUBLANES] = before[-SUBLANES:].astype(jnp.float32)
    row[SUBLANES:] = x
    shifted = [row[SUBLANES - s : row.shape[0] - s] for s in range(1, width)]
    return [x, *(_where_seen(seen, s, u) for s, u in enumerate(shifted, 1))]


def _shifted(rows, x, width):
    """x with zeros around it from s tokens later on, for every s, in its scratch memory.

    Slices of an array rather than of memory would be aligned anew for every group.
    """
    if x is None:
        return [None] * width
    around = jnp.zeros((SUBLANES, x.shape[1]), x.dtype)
    rows[:SUBLANES] = around
    rows[SUBLANES:-SUBLANES] = x
    rows[-SUBLANES:] = around
    return [rows[s : s + x.shape[0] + SUBLANES] for s in range(width)]


def _where_seen(seen, s, x):
    return x if seen is None or s == 0 else jnp.where(seen >= s, x, 0)


def _weighted(taps, kernel, bias=None, lanes=None):
    width = kernel.shape[0]
    z = sum(kernel[width - 1 - s : width - s] * tap for s, tap in enumerate(taps))
    return z if bias is None else z + bias[:, lanes]
