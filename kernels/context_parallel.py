"""Rows whose time axis is split: each stretch of a row's tokens is worked on by itself.

Over devices here, and within a core in `splits.py`.

A stretch acts on the state S that enters it as an affine map, and its outputs are affine in S too:

    S'  = M S + E                 M [K, K]
    o_t = R_t^T S + ...           R_t [K]: what token t reads of S

One run of the op gives these, and the outputs o' from a zero state: its state begins as [0 | I],
with zeros for the values of I's columns, and ends as [E | M], and its outputs are [o' | R].
Documents and padding are masked in the op as ever, which makes M = 0 where a document starts within
the stretch. For SimpleGLA R_t is q_t times the decay up to t, and M the decay of the whole stretch,
a number.

All devices gather the M and E of all stretches, in one collective, and work out the state X that
enters their own:

    X_0 = 0                       X_(r+1) = M_r X_r + E_r

A state that a stretch has of its own, as the first one has the row's initial state, is in place of
zero where E is computed, and is added to X. The outputs are o' + R X, or those of the op run from X
where its residuals are wanted or, for SimpleGLA, where that costs less.

The gradients of states go the other way. Given those of a stretch's outputs and of the state that
leaves it, do and dS',

    dE_r    = M_r^T dS'_r + sum over t of R_t do_t^T
    Y_(n-1) = 0                   Y_(r-1) = M_r^T Y_r + dE_r

after one gathering of all M^T and dE, and the op's backward pass runs once, from dS' + Y. Saved for
it, beside what the op saves: M, X and R.

States and maps are float32. What a device holds does not grow with the number of devices, but for
the gathered maps. Counted for a v6e, in million cycles for a stretch of 8192 tokens (one of eight;
16 heads of 128, bfloat16) and, in brackets, for a row of its own:

                        forward         forward and backward
    gated delta rule    0.7 (0.5)       2.6 (1.1)
    KDA                 0.9 (0.7)       3.7 (2.0)
    SimpleGLA           0.4 (0.2)       1.1 (0.5)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from .implementation import Implementation, Options
from .numerics import storage_dtype
from .packing import Packing, zero_padding
from .reference import HIGHEST, l2norm

TILE = 1024
"""Numbers that a TPU keeps together. The compiler makes an all-reduce, of twice the traffic, out of
a gathering of anything but whole tiles."""


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

    def any(self, x: Bool[Array, " B"]) -> Bool[Array, " B"]:
        """Whether x is true for any stretch of a row."""
        return jax.lax.pmax(x.astype(jnp.int32), self.axes) > 0

    def enter(self, state: Float[Array, "B *N HV K V"]) -> Float[Array, "B *N HV K V"]:
        """The row's initial state, for its first stretch."""
        return jnp.where(self.index == 0, state, 0)

    def leave(self, state: Float[Array, "B *N HV K V"]) -> Float[Array, "B *N HV K V"]:
        """The state after the row's last stretch, on every device."""
        return jax.lax.psum(jnp.where(self.index == self.count - 1, state, 0), self.axes)

    def entering(
        self,
        transition: Float[Array, "B N HV D D"],
        added: Float[Array, "B N HV K V"],
        *,
        reverse: bool = False,
    ) -> Float[Array, "B N HV K V"]:
        """X from M and E of every stretch; with `reverse`, of the later stretches.

        D is K, or 1 where M is a number.
        """
        flat, unravel = ravel_pytree((transition, added))
        tiles = jnp.pad(flat, (0, -flat.size % TILE))
        maps = jax.lax.all_gather(tiles, self.axes)[:, : flat.size]
        transitions, added = jax.vmap(unravel)(maps)
        return entering_states(transitions, added, reverse)[self.index]


def context_parallel(
    stretch: Implementation, affine_map: Callable[..., Any], stretches: Any
) -> Implementation:
    """An implementation for whole rows, out of the one for each of their stretches.

    Args:
        stretch: the implementation that a stretch runs.
        affine_map: of its op, `matrix_map` or `decay_map`.
        stretches: how rows are cut, `Stretches` or `Splits`.
    """

    def outputs(options, tokens, states, *documents):
        stretch_map = affine_map(stretch, options, tokens, states, *documents)
        x = stretches.entering(stretch_map.transition, stretch_map.added)
        if stretch_map.outputs is None:
            return stretch.outputs(options, tokens, states + x, *documents)
        o = stretch.add_reads(options, stretch_map.outputs, x[:, 0]).astype(tokens[2].dtype)
        return o, stretch_map.added + _multiply(stretch_map.transition, x)

    def forward(options, tokens, states, *documents):
        stretch_map = affine_map(stretch, options, tokens, states, *documents)
        x = stretches.entering(stretch_map.transition, stretch_map.added)
        outputs, residuals = stretch.forward(options, tokens, states + x, *documents)
        saved = {"reads": stretch_map.reads, "transition": stretch_map.transition, "entering": x}
        return outputs, residuals | saved

    def backward(options, tokens, states, packing, chunk_document, residuals, do, dstates):
        residuals = dict(residuals)
        reads, transition, x = map(residuals.pop, ("reads", "transition", "entering"))
        transition = jnp.swapaxes(transition, -1, -2)
        added = _multiply(transition, dstates)
        do_valid = zero_padding(do, packing)
        added += _product(options, tokens, "bthk,bthv->bhkv", reads, do_valid)[:, None]
        dstates += stretches.entering(transition, added, reverse=True)
        inputs = tokens, states + x, packing, chunk_document
        return stretch.backward(options, *inputs, residuals, do, dstates)

    return Implementation(forward, backward, outputs)


class AffineMap(NamedTuple):
    """What a stretch does: R, M and E, and [o' | R] where o' + R X costs less than another run.

    D is K, or 1 where M is a number.
    """

    reads: Float[Array, "B T HV K"]
    transition: Float[Array, "B N HV D D"]
    added: Float[Array, "B N HV K V"]
    outputs: Float[Array, "B T HV V+K"] | None = None


def matrix_map(stretch, options, tokens, states, *documents):
    """That of a delta rule."""
    q, k, v, *gates = tokens
    key_size, value_size = k.shape[3], v.shape[3]
    v = v.astype(storage_dtype(q, k, v))
    identity = jnp.eye(key_size, dtype=states.dtype)
    identity = jnp.broadcast_to(identity, (*states.shape[:-1], key_size))
    states = jnp.concatenate([states, identity], axis=-1)
    o, states = stretch.outputs(options, (q, k, v, *gates), states, *documents)
    added, transition = jnp.split(states, [value_size], axis=-1)
    return AffineMap(o[..., value_size:], transition, added, o)


def decay_map(stretch, options, tokens, states, packing, chunk_document):
    """That of decay alone: M is a number, and R_t is q_t times the decay up to t."""
    q, _, v, g = tokens
    rows = packing or Packing.unpacked(*q.shape[:2])
    entered = (rows.valid & (rows.document == 0))[..., None]
    decay = jnp.exp(jnp.cumsum(jnp.where(entered, g.astype(jnp.float32), 0), axis=1))
    if options.qk_l2norm:
        q = l2norm(q.astype(jnp.float32))
    q = jnp.repeat(q, v.shape[2] // q.shape[2], axis=2)
    reads = jnp.where(entered[..., None], options.scale * decay[..., None] * q, 0)
    transition = jnp.where(rows.document[:, -1:] == 0, decay[:, -1], 0)
    _, added = stretch.outputs(options, tokens, states, packing, chunk_document)
    reads = reads.astype(storage_dtype(*tokens[:3]))
    return AffineMap(reads, transition[:, None, :, None, None], added)


def entering_states(
    transition: Float[Array, "n B N HV D D"], added: Float[Array, "n B N HV K V"], reverse: bool
) -> Float[Array, "n B N HV K V"]:
    """X of n stretches, the first axis, from their M and E; D is K, or 1 where M is a number."""

    def step(x, stretch_map):
        transition, added = stretch_map
        return _multiply(transition, x) + added, x

    return jax.lax.scan(step, jnp.zeros_like(added[0]), (transition, added), reverse=reverse)[1]


def _multiply(transition: Float[Array, "... D D"], x: Float[Array, "... K V"]):
    """M x, where M may be a number, [1, 1]."""
    if transition.shape[-1] == 1:
        return transition * x
    return jnp.matmul(transition, x, precision=HIGHEST)


def _product(options: Options, tokens, subscripts: str, x: Array, y: Array) -> Float[Array, "..."]:
    """An einsum in float32, from bfloat16 operands where a TPU's op takes such."""
    precision = options.precision
    if precision is None and storage_dtype(*tokens[:3]) == jnp.float32:
        precision = HIGHEST
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(subscripts, x, y, precision=precision)
