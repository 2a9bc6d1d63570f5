"""How the arrays of a call are cut into the blocks of its grid steps.

Tokens are [B, T, heads * size], as projections make them: a 4-D operand would force a relayout of
every tensor. A grid step (batch row, block of heads, block of chunks) holds `chunks * CHUNK` rows
of `heads` value heads, side by side on the lanes, and of the key heads that those read. Gates are
[B, HV / heads, heads, T], time on the lanes. The last block may run past T: what lies beyond is
undefined until `clear_padding` has run.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..packing import CHUNK, Packing
from .tuning import Tuning

LANES = 128


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A call's sizes, and its blocks' sizes.

    Attributes:
        heads: value heads a block.
        chunks: chunks a block.
        reverse: whether the grid walks through time backwards.
    """

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    heads: int
    chunks: int
    reverse: bool = False

    @classmethod
    def of(
        cls,
        q: Float[Array, "B T H K"],
        v: Float[Array, "B T HV V"],
        dtype: jnp.dtype,
        tuning: Tuning,
        *,
        one_chunk: bool,
        reverse: bool = False,
    ) -> "Blocks":
        """Cut a call by a tuning.

        Head sizes grow to a multiple of half a register, or of a whole one where heads of half a
        register cannot be cut into blocks. `one_chunk`: see `step_documents`.
        """
        batch, length, key_heads, key_size = q.shape
        value_heads, value_size = v.shape[2:]
        for unit in (LANES // 2, LANES):
            sizes = tuple(pl.cdiv(size, unit) * unit for size in (key_size, value_size))
            limit = tuning.for_heads(max(sizes), jnp.dtype(dtype).itemsize).heads
            heads = heads_per_block(value_heads, key_heads, sizes, limit)
            if heads <= limit:
                break
        chunks = 1 if one_chunk else min(tuning.chunks, pl.cdiv(length, CHUNK))
        return cls(batch, length, key_heads, value_heads, *sizes, heads, chunks, reverse)

    @property
    def group(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads

    @property
    def block_key_heads(self) -> int:
        return max(1, self.heads // self.group)

    @property
    def sharing(self) -> int:
        """Blocks of value heads that read the same key head."""
        return max(1, self.group // self.heads)

    @property
    def rows(self) -> int:
        return self.chunks * CHUNK

    @property
    def steps(self) -> int:
        return pl.cdiv(self.length, self.rows)

    @property
    def num_chunks(self) -> int:
        return pl.cdiv(self.length, CHUNK)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.value_heads // self.heads, self.steps

    def time(self, step):
        """The block in time that a grid step works on."""
        return self.steps - 1 - step if self.reverse else step

    def keys(self) -> pl.BlockSpec:
        """Of q and k `[B, T, H * K]`."""
        lanes = self.block_key_heads * self.key_size
        return pl.BlockSpec(
            (None, self.rows, lanes), lambda b, h, t, *_: (b, self.time(t), h // self.sharing)
        )

    def key_gradients(self) -> pl.BlockSpec:
        """Of dq and dk `[B, T, sharing * H * K]`, every block its own."""
        lanes = self.block_key_heads * self.key_size
        return pl.BlockSpec((None, self.rows, lanes), lambda b, h, t, *_: (b, self.time(t), h))

    def values(self) -> pl.BlockSpec:
        """Of v and o `[B, T, HV * V]`."""
        lanes = self.heads * self.value_size
        return pl.BlockSpec((None, self.rows, lanes), lambda b, h, t, *_: (b, self.time(t), h))

    def gates(self) -> pl.BlockSpec:
        """Of `time_on_lanes`."""
        return pl.BlockSpec(
            (None, None, self.heads, self.rows), lambda b, h, t, *_: (b, h, 0, self.time(t))
        )

    def runs(self) -> pl.BlockSpec:
        """Of `document_runs`."""
        return pl.BlockSpec((None, 2, self.rows), lambda b, h, t, *_: (b, 0, self.time(t)))

    def per_chunk(self, *shape: int) -> pl.BlockSpec:
        """Of `[B, HV, chunks, *shape]`."""
        zeros = (0,) * len(shape)
        return pl.BlockSpec(
            (None, self.heads, self.chunks, *shape),
            lambda b, h, t, *_: (b, h, self.time(t), *zeros),
        )

    def states(self) -> pl.BlockSpec:
        """Of `[B, N, HV, K, V]`: the state of the document that `step_documents` names."""
        return pl.BlockSpec(
            (None, None, self.heads, self.key_size, self.value_size),
            lambda b, h, t, documents: (b, documents[b * self.steps + self.time(t)], h, 0, 0),
        )

    def time_on_lanes(self, x: Float[Array, "B T HV"]) -> Float[Array, "B HV/heads heads S"]:
        """Gates, padded with zeros to whole blocks. The transposition costs no pass over them."""
        x = jnp.pad(x, ((0, 0), (0, self.steps * self.rows - self.length), (0, 0)))
        return x.transpose(0, 2, 1).reshape(self.batch, -1, self.heads, x.shape[1])

    def time_first(self, x: Float[Array, "B HV/heads heads S"]) -> Float[Array, "B T HV"]:
        """The inverse of `time_on_lanes`."""
        x = x.reshape(self.batch, self.value_heads, -1)
        return x[:, :, : self.length].transpose(0, 2, 1)

    def step_documents(self, chunk_document: Array | None) -> Array:
        """For each step the document whose state it reads and updates: a scalar-prefetch operand.

        With a state per document a step holds one chunk.
        """
        if chunk_document is None:
            return jnp.zeros(self.batch * self.steps, jnp.int32)
        return chunk_document.reshape(-1)

    def document_runs(self, packing: Packing) -> Array:
        """`[B, 2, S]`: each row's run, and whether it is valid (1) or padding (0).

        Run 0 of a chunk is the document of the row before the chunk; each later document of the
        chunk has a larger number.
        """
        padding = ((0, 0), (0, self.steps * self.rows - self.length))
        document = jnp.pad(packing.document, padding, mode="edge")
        valid = jnp.pad(packing.valid, padding).astype(jnp.int32)
        before = jnp.pad(document[:, CHUNK - 1 : -1 : CHUNK], ((0, 0), (1, 0)))
        before = before.at[:, 0].set(document[:, 0])
        run = document - jnp.repeat(before, CHUNK, axis=1)
        return jnp.stack([run, valid], axis=1)


def heads_per_block(value_heads: int, key_heads: int, sizes: tuple[int, ...], limit: int) -> int:
    """The most heads, at most `limit`, whose blocks are whole registers wide, or else all heads.

    Args:
        value_heads: HV.
        key_heads: H.
        sizes: of a key head and of a value head.
        limit: see `Tuning.heads`.
    """
    group = value_heads // key_heads
    key_size, value_size = sizes

    def fits(heads):
        whole = heads == value_heads
        keys = max(1, heads // group) * key_size
        return (
            (heads % group == 0 or group % heads == 0)
            and (whole or heads * value_size % LANES == 0)
            and (whole or keys % LANES == 0)
        )

    divisors = [d for d in range(1, value_heads + 1) if value_heads % d == 0 and fits(d)]
    return max((d for d in divisors if d <= limit), default=divisors[0])


def pad_heads(x: Float[Array, "... D"], size: int) -> Float[Array, "... size"]:
    """Zeros up to the head size that the kernel takes; they change no result."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def pad_states(x: Float[Array, "... K V"], blocks: Blocks) -> Float[Array, "... K' V'"]:
    """As `pad_heads`, both axes of a state."""
    last = [
        (0, size - n)
        for size, n in zip((blocks.key_size, blocks.value_size), x.shape[-2:], strict=True)
    ]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + last)


def chunk_rows(chunk: int) -> slice:
    return slice(chunk * CHUNK, (chunk + 1) * CHUNK)


def lanes(head: int, size: int) -> slice:
    """Where a head lies in a block of tokens."""
    return slice(head * size, (head + 1) * size)


def document_ends(blocks: Blocks, step_documents) -> tuple[Array, Array]:
    """Whether this grid step is its document's first, and whether it is the last, in time."""
    time = blocks.time(pl.program_id(2))
    step = pl.program_id(0) * blocks.steps + time
    document = step_documents[step]
    before = step_documents[jnp.maximum(step - 1, 0)]
    after = step_documents[jnp.minimum(step + 1, blocks.batch * blocks.steps - 1)]
    first = (time == 0) | (before != document)
    last = (time == blocks.steps - 1) | (after != document)
    return first, last


def clear_padding(blocks: Blocks, runs, *tokens) -> None:
    """Zero the rows of token blocks that hold no valid token: their garbage may be NaN."""
    time = blocks.time(pl.program_id(2))
    if runs is not None:
        has_padding = jnp.min(runs[1:]) == 0
    elif blocks.length % blocks.rows:
        has_padding = time == blocks.steps - 1
    else:
        return

    @pl.when(has_padding)
    def _():
        for rows in map(chunk_rows, range(blocks.chunks)):
            if runs is not None:
                valid = column(runs[1:, rows]) > 0
            else:
                valid = time * blocks.rows + rows.start + iota(0) < blocks.length
            for ref in tokens:
                x = ref[rows]
                ref[rows] = jnp.where(valid[:, :1], x.astype(jnp.float32), 0).astype(x.dtype)


def column(row: Array) -> Array:
    """`[1, CHUNK]` to `[CHUNK, CHUNK]`, entry i in all lanes of row i."""
    return jnp.broadcast_to(row, (CHUNK, CHUNK)).T


def widen(x: Array, size: int) -> Array:
    """A column whose lanes are all alike, `[rows, LANES]`, as `[rows, size]`."""
    return jnp.concatenate([x] * pl.cdiv(size, LANES), axis=1)[:, :size]


def iota(axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis)
