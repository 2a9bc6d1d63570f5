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
from .token_blocks import HALO, TokenBlocks


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

    def body(x, halo, history, kernel, bias, visible, y):
        seen = None if visible is None else _on_sublanes(visible)
        before = jnp.where(pl.program_id(2) == 0, history[...], halo[...])
        for lanes in blocks.groups():
            taps = _taps(before[:, lanes], x[:, lanes], seen, width)
            z = _weighted(taps, kernel[:, lanes])
            if bias is not None:
                z += bias[:, lanes]
            y[:, lanes] = activation(z).astype(y.dtype)

    return pallas_call(
        body,
        grid=blocks.grid,
        in_specs=[
            blocks.tokens(),
            blocks.halo(),
            blocks.per_row(HALO),
            blocks.shared(width),
            None if bias is None else blocks.shared(1),
            None if visible is None else blocks.numbers(),
        ],
        out_specs=blocks.tokens(),
        out_shape=y.update(dtype=storage_dtype(y)),
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

    def body(x, halo, history, kernel, bias, visible, dy, dx, dhistory, sums, later):
        step = pl.program_id(2)
        time = blocks.time(step)
        seen = None if visible is None else _on_sublanes(visible)
        before = jnp.where(time == 0, history[...], halo[...])

        @pl.when(step == 0)
        def _():
            later[...] = jnp.zeros_like(later)
            sums[...] = jnp.zeros_like(sums)

        for lanes in blocks.groups():
            weights = kernel[:, lanes]
            taps = _taps(before[:, lanes], blocks.clear(time, x[:, lanes]), seen, width)
            z = _weighted(taps, weights)
            if bias is not None:
                z += bias[:, lanes]
            _, vjp = jax.vjp(activation, z)
            (p,) = vjp(blocks.clear(time, dy[:, lanes]).astype(jnp.float32))
            products = [p * tap for tap in reversed(taps)] + [p]
            sums[:, lanes] += jnp.concatenate(
                [jnp.sum(x, axis=0, keepdims=True) for x in products], axis=0
            )
            dtaps = _dtaps(p, seen, width)
            given = _weighted(dtaps, weights)
            end = given[-SUBLANES:] + later[:, lanes]
            dx[:, lanes] = jnp.concatenate([given[SUBLANES:-SUBLANES], end]).astype(dx.dtype)
            later[:, lanes] = given[:SUBLANES]
            dhistory[:, lanes] = given[:SUBLANES]

    channels = x.shape[2]
    dx, dhistory, sums = pallas_call(
        body,
        grid=blocks.grid,
        in_specs=[
            blocks.tokens(),
            blocks.halo(),
            blocks.per_row(HALO),
            blocks.shared(width),
            None if bias is None else blocks.shared(1),
            None if visible is None else blocks.numbers(),
            blocks.tokens(),
        ],
        out_specs=[blocks.tokens(), blocks.per_row(SUBLANES), blocks.per_row(width + 1)],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, storage_dtype(x)),
            jax.ShapeDtypeStruct((x.shape[0], SUBLANES, channels), jnp.float32),
            jax.ShapeDtypeStruct((x.shape[0], width + 1, channels), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((SUBLANES, blocks.lanes), jnp.float32)],
        compiler_params=blocks.compiler_params,
        name="short_convolution_backward",
    )(*_operands(x, kernel, bias, history, visible), dy.astype(storage_dtype(dy)))
    sums = jnp.sum(sums, axis=0)
    return dx.astype(x.dtype), sums[:-1], sums[-1], dhistory[:, SUBLANES - (width - 1) :]


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


def _on_sublanes(visible):
    return jnp.broadcast_to(visible[...], (LANES, visible.shape[1])).T


def _taps(before, x, seen, width):
    """u_s of a block, for every s."""
    before, x = before[-SUBLANES:].astype(jnp.float32), x.astype(jnp.float32)
    row = jnp.concatenate([before, x])
    shifted = [row[SUBLANES - s : row.shape[0] - s] for s in range(1, width)]
    return [x, *(_where_seen(seen, s, u) for s, u in enumerate(shifted, 1))]


def _dtaps(p, seen, width):
    """p_(t+s) for every s, from `SUBLANES` tokens before the block on."""
    around = jnp.zeros((SUBLANES, p.shape[1]), p.dtype)
    masked = [p, *(_where_seen(seen, s, p) for s in range(1, width))]
    rows = [jnp.concatenate([around, p, around]) for p in masked]
    return [row[s : s + p.shape[0] + SUBLANES] for s, row in enumerate(rows)]


def _where_seen(seen, s, x):
    return x if seen is None else jnp.where(seen >= s, x, 0)


def _weighted(taps, kernel):
    width = len(taps)
    return sum(kernel[width - 1 - s : width - s] * tap for s, tap in enumerate(taps))
