"""Rows whose time axis is split over devices: each works on a stretch of its rows' tokens.

A stretch acts on the state S that enters it as an affine map, and its outputs are affine in S too:

    o_t = R_t^T S + o'_t          R_t [K], what token t reads
    S  <- M S + E                 M [K, K]

o' and E are what the stretch gives from a zero state. All four come out of the op itself: columns
of a state do not meet each other, so that from the states [0 | I], with zeros as the values of the
columns I, the op gives the outputs [o' | R] and the states [E | M]. Documents and padding need no
care: they are masked as ever, and M = 0 where a document starts within the stretch.

Every device computes its map. All devices gather all M and E, in one collective, and work out which
state X enters their own stretch:

    X_0 = 0                       X_(r+1) = M_r X_r + E_r

Whether the outputs are then R^T X + o', or those of the op anew from X: they are the former where
no gradient is wanted, and the latter where the residuals of X are. For a state of its own that a
stretch starts from, which is how the row's initial state enters the first one, the map is that from
[S | I], and E holds M S.

The gradients of states go the other way. With the gradients do and dS' of a stretch's outputs and
of the state that leaves it,

    dE  = M^T dS' + sum_t R_t do_t^T          the gradient of the state that enters
    Y_n = 0                                   Y_(r-1) = M_r^T Y_r + dE_r

so that the backward pass gathers all M^T and dE, and runs once, from dS' + Y. Saved for it, beside
what the op saves: M, X and R. States and maps are float32; what a device holds does not depend on
the number of devices, but for the gathered maps, [K, K + V] a head and device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from .arguments import MAX_HEAD_SIZE
from .implementation import Implementation, Options
from .numerics import storage_dtype
from .packing import Packing

HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Stretches:
    """The stretches that rows are cut into, one on each device along mesh axes.

    Its methods are called on every device, within `jax.shard_map`.
    """

    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        return jax.lax.axis_size(self.axes)

    @property
    def index(self) -> Int[Array, ""]:
        """Of this device's stretch."""
        return jax.lax.axis_index(self.axes)

    def packing(
        self,
        segment_ids: Int[Array, "B t"] | None,
        cu_seqlens: Int[Array, " N+1"] | None,
        length: int,
    ) -> Packing | None:
        """The documents of a stretch of `length` tokens, counted from the one that enters it."""
        if segment_ids is not None:
            before = self._before(segment_ids)
            row = Packing.from_segment_ids(jnp.concatenate([before, segment_ids], axis=1))
            return jax.tree.map(lambda x: x[:, before.shape[1] :], row)
        if cu_seqlens is None:
            return None
        start = self.index * length
        packing = Packing.from_cu_seqlens(jnp.maximum(cu_seqlens - start, 0), length)
        entered = jnp.searchsorted(cu_seqlens[1:-1], start - 1, side="right")
        return dataclasses.replace(packing, document=packing.document - entered)

    def _before(self, segment_ids: Int[Array, "B t"]) -> Int[Array, "B 2"]:
        """Ids of two tokens that stand for all before the stretch: one of any document, the last.

        The first is 0 if there is no document, and both are where there is no token.
        """
        end = jnp.stack([jnp.max(jnp.abs(segment_ids), axis=1), segment_ids[:, -1]], axis=1)
        ends = jax.lax.all_gather(end, self.axes)
        earlier = jnp.arange(self.count)[:, None] < self.index
        document = jnp.max(jnp.where(earlier, ends[..., 0], 0), axis=0)
        last = jnp.where(self.index > 0, ends[self.index - 1, :, 1], 0)
        return jnp.stack([jnp.where(last != 0, last, document), last], axis=1)

    def enter(self, state: Float[Array, "B HV K V"]) -> Float[Array, "B HV K V"]:
        """The row's initial state, for its first stretch."""
        return jnp.where(self.index == 0, state, 0)

    def leave(self, state: Float[Array, "B HV K V"]) -> Float[Array, "B HV K V"]:
        """The state after the row's last stretch, on every device."""
        return jax.lax.psum(jnp.where(self.index == self.count - 1, state, 0), self.axes)

    def entering(
        self,
        transition: Float[Array, "B N HV K K"],
        added: Float[Array, "B N HV K V"],
        *,
        reverse: bool = False,
    ) -> Float[Array, "B N HV K V"]:
        """X from M and E of every stretch; with `reverse`, of the later stretches."""
        flat, unravel = ravel_pytree((transition, added))
        maps = jax.vmap(unravel)(jax.lax.all_gather(flat, self.axes))

        def step(x, stretch_map):
            transition, added = stretch_map
            return _multiply(transition, x) + added, x

        _, x = jax.lax.scan(step, jnp.zeros_like(added), maps, reverse=reverse)
        return x[self.index]


def context_parallel(stretch: Implementation, stretches: Stretches) -> Implementation:
    """An implementation for whole rows, out of the one for each of their stretches."""
    return Implementation(
        *(functools.partial(f, stretch, stretches) for f in (_forward, _backward, _outputs))
    )


def _outputs(stretch, stretches, options, tokens, states, *documents):
    (o, reads), (added, transition) = _affine_map(stretch, options, tokens, states, *documents)
    x = stretches.entering(transition, added)
    o += _product(options, tokens, "bthk,bhkv->bthv", reads, x[:, 0]).astype(o.dtype)
    return o, added + _multiply(transition, x)


def _forward(stretch, stretches, options, tokens, states, *documents):
    (_, reads), (added, transition) = _affine_map(stretch, options, tokens, states, *documents)
    x = stretches.entering(transition, added)
    outputs, residuals = stretch.forward(options, tokens, states + x, *documents)
    return outputs, residuals | {"reads": reads, "transition": transition, "entering": x}


def _backward(
    stretch, stretches, options, tokens, states, packing, chunk_document, residuals, do, dstates
):
    residuals = dict(residuals)
    reads, transition, x = (residuals.pop(name) for name in ("reads", "transition", "entering"))
    transition = jnp.swapaxes(transition, -1, -2)
    added = _multiply(transition, dstates)
    added += _product(options, tokens, "bthk,bthv->bhkv", reads, _valid(packing, do))[:, None]
    dstates += stretches.entering(transition, added, reverse=True)
    inputs = tokens, states + x, packing, chunk_document
    return stretch.backward(options, *inputs, residuals, do, dstates)


def _affine_map(stretch, options, tokens, states, *documents):
    """The outputs [o' | R] and the states [E | M], each in its two parts."""
    q, k, v, *gates = tokens
    key_size, value_size = states.shape[-2:]
    identity = jnp.eye(key_size, dtype=states.dtype)
    identity = jnp.broadcast_to(identity, (*states.shape[:-1], key_size))
    states = jnp.concatenate([states, identity], axis=-1)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, key_size)))
    parts = []
    for start in range(0, states.shape[-1], MAX_HEAD_SIZE):
        columns = slice(start, start + MAX_HEAD_SIZE)
        part = q, k, v[..., columns], *gates
        parts.append(stretch.outputs(options, part, states[..., columns], *documents))
    whole = (jnp.concatenate(x, axis=-1) for x in zip(*parts, strict=True))
    return tuple(jnp.split(x, [value_size], axis=-1) for x in whole)


def _multiply(transition: Float[Array, "... K K"], x: Float[Array, "... K V"]):
    return jnp.matmul(transition, x, precision=HIGHEST)


def _valid(packing: Packing | None, x: Float[Array, "B t HV V"]) -> Float[Array, "B t HV V"]:
    """Zeros for padding tokens, whatever they held."""
    return x if packing is None else jnp.where(packing.valid[..., None, None], x, 0)


def _product(options: Options, tokens, subscripts: str, x: Array, y: Array) -> Float[Array, "..."]:
    """An einsum in float32, from bfloat16 operands where a TPU's op takes such."""
    precision = options.precision
    if precision is None and storage_dtype(*tokens[:3]) == jnp.float32:
        precision = HIGHEST
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(subscripts, x, y, precision=precision)
