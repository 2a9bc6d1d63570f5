"""How the arrays of a call are cut into the blocks of its grid steps.

Tokens are [B, T, heads * size], as projections make them: a 4-D operand would force a relayout of
every tensor. A grid step (block of batch rows, of heads, of chunks) holds, of each batch row,
`chunks * CHUNK` rows of `heads` value heads, side by side on the lanes, and of the key heads that
those read. Gates are [B, HV / heads, heads, T], time on the lanes. The last block may run past T:
what lies beyond is undefined until `BatchRow.clear_padding` has run.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..packing import CHUNK, Packing
from .tuning import Tuning

LANES = 128
SUBLANES = 8
MOST_CHUNKS = 4
"""Times the tuned number of chunks that a block of fewer heads holds: with one head, 131072 tokens
take the gated delta rule 1.10 million cycles of a v6e chip forward and 1.33 backward, 1.25 and 1.65
with a chunk a block."""


class Blocked(NamedTuple):
    """An array of a call, or what an output is like, and the block of it that a grid step holds."""

    array: Array | jax.ShapeDtypeStruct
    spec: pl.BlockSpec


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A call's sizes, and its blocks' sizes.

    Attributes:
        value_size: channels of an output, and columns of a state.
        written_size: channels of a value; fewer where the state's other columns get zeros.
        heads: value heads a block.
        chunks: chunks a block.
        batch_rows: batch rows a block.
        reverse: whether the grid walks through time backwards.
        vmem_limit_bytes: see `Tuning`.
    """

    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    written_size: int
    heads: int
    chunks: int
    batch_rows: int
    reverse: bool
    vmem_limit_bytes: int

    @classmethod
    def of(
        cls,
        q: Float[Array, "B T H K"],
        v: Float[Array, "B T HV V"],
        tuning: Tuning,
        *,
        one_chunk: bool,
        reverse: bool = False,
        columns: int | None = None,
    ) -> "Blocks":
        """Cut a call by a tuning, with states of as many columns as v has channels, or `columns`.

        Head sizes grow to half a register or whole ones; to whole ones where an odd number of
        heads cannot share registers. `one_chunk`: see `prefetched`; every batch row then reads
        another document's state, and is a block of its own.
        """
        batch, length, key_heads, key_size = q.shape
        value_heads, written_size = v.shape[2:]
        columns = written_size if columns is None else columns
        for smallest in (LANES // 2, LANES):
            sizes = _native_size(key_size, smallest), _native_size(columns, smallest)
            written = sizes[1] if written_size % LANES else written_size
            limit = tuning.heads_of(max(sizes[0], written))
            heads = heads_per_block(value_heads, key_heads, sizes, limit)
            if heads is not None:
                break
        assert heads is not None, "heads of whole registers always make blocks"
        batch_rows = chunks = 1
        if not one_chunk:
            a_core = batch * (value_heads // heads) // tuning.cores
            batch_rows = _largest_divisor(batch, min(limit // heads, a_core))
            more = min(limit // (heads * batch_rows), MOST_CHUNKS)
            chunks = min(more * tuning.chunks, pl.cdiv(length, CHUNK))
        return cls(
            batch,
            length,
            key_heads,
            value_heads,
            *sizes,
            written,
            heads,
            chunks,
            batch_rows,
            reverse,
            tuning.vmem_limit_bytes,
        )

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
    def state_lanes(self) -> tuple[int, int]:
        """Of a state in a kernel, where heads of half a register take a whole one."""
        return max(self.key_size, LANES), max(self.value_size, LANES)

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
        return self.batch // self.batch_rows, self.value_heads // self.heads, self.steps

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        return pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=self.vmem_limit_bytes,
        )

    def time(self, step):
        """The block in time that a grid step works on."""
        return self.steps - 1 - step if self.reverse else step

    def keys(self, x: Float[Array, "B T H*K"]) -> Blocked:
        """Of q and k."""
        return self._of_tokens(x, self.block_key_heads * self.key_size, self.sharing)

    def key_gradients(self, x: Float[Array, "B T H*K"]) -> Blocked:
        """Of dq and dk, for such q: `[B, T, sharing * H * K]`, float32 if they are to be summed."""
        shape = (*x.shape[:2], x.shape[2] * self.sharing)
        dtype = x.dtype if self.sharing == 1 else jnp.float32
        lanes = self.block_key_heads * self.key_size
        return self._of_tokens(jax.ShapeDtypeStruct(shape, dtype), lanes)

    def values(self, x: Float[Array, "B T HV*V"] | jax.ShapeDtypeStruct) -> Blocked:
        """Of what has as many channels as o."""
        return self._of_tokens(x, self.heads * self.value_size)

    def outputs(self, v: Float[Array, "B T HV*W"]) -> Blocked:
        """Of o, for such v."""
        shape = (*v.shape[:2], self.value_heads * self.value_size)
        return self.values(jax.ShapeDtypeStruct(shape, v.dtype))

    def written_values(self, x: Float[Array, "B T HV*W"]) -> Blocked:
        """Of v."""
        return self._of_tokens(x, self.heads * self.written_size)

    def channel_gates(self, x: Float[Array, "B T HV*K"]) -> Blocked:
        """Of gates, one per key channel."""
        return self._of_tokens(x, self.heads * self.key_size)

    def _of_tokens(self, x, lanes, sharing=1):
        block = (self.batch_rows, self.rows, lanes)
        return Blocked(x, pl.BlockSpec(block, lambda b, h, t, *_: (b, self.time(t), h // sharing)))

    def gates(self, x: Float[Array, "B HV/heads heads S"]) -> Blocked:
        """Of `time_on_lanes`."""
        block = (self.batch_rows, None, self.heads, self.rows)
        return Blocked(x, pl.BlockSpec(block, lambda b, h, t, *_: (b, h, 0, self.time(t))))

    def row_document(self, x: Int[Array, "B 1 S"] | None) -> Blocked | None:
        """Of `row_documents`."""
        if x is None:
            return None
        block = (self.batch_rows, 1, self.rows)
        return Blocked(x, pl.BlockSpec(block, lambda b, h, t, *_: (b, 0, self.time(t))))

    def per_chunk(self, x: Float[Array, "B HV chunks *shape"] | jax.ShapeDtypeStruct) -> Blocked:
        """Of what there is of each chunk of each head."""
        shape = x.shape[3:]
        block = (self.batch_rows, self.heads, self.chunks, *shape)
        zeros = (0,) * len(shape)
        return Blocked(x, pl.BlockSpec(block, lambda b, h, t, *_: (b, h, self.time(t), *zeros)))

    def saved(self, dtype: jax.typing.DTypeLike, *shape: int) -> Blocked:
        """Of an output per chunk of each head."""
        whole = (self.batch, self.value_heads, self.num_chunks, *shape)
        return self.per_chunk(jax.ShapeDtypeStruct(whole, dtype))

    def states(self, x: Float[Array, "B N HV K V"]) -> Blocked:
        """Of states: that of the document which `prefetched` names."""

        def index(b, h, t, documents, *_):
            return b, documents[b * self.batch_rows * self.steps + self.time(t)], h, 0, 0

        block = (self.batch_rows, None, self.heads, self.key_size, self.value_size)
        return Blocked(x, pl.BlockSpec(block, index))

    def carried(self) -> pl.MemoryRef:
        """The states of a block, from one of its grid steps to the next."""
        return pltpu.VMEM((self.batch_rows, self.heads, *self.state_lanes), jnp.float32)

    def step(self, row: int):
        """Where this grid step's part of a batch row stands in `prefetched`."""
        return (pl.program_id(0) * self.batch_rows + row) * self.steps + self.time(pl.program_id(2))

    def time_on_lanes(self, x: Float[Array, "B T HV"]) -> Float[Array, "B HV/heads heads S"]:
        """Gates, padded with zeros to whole blocks. The transposition costs no pass over them."""
        x = self._pad_time(x)
        return x.transpose(0, 2, 1).reshape(self.batch, -1, self.heads, x.shape[1])

    def time_first(self, x: Float[Array, "B HV/heads heads S"]) -> Float[Array, "B T HV"]:
        """The inverse of `time_on_lanes`."""
        x = x.reshape(self.batch, self.value_heads, -1)
        return x[:, :, : self.length].transpose(0, 2, 1)

    def sum_key_gradients(self, x: Float[Array, "B T sharing*H*K"]) -> Float[Array, "B T H K"]:
        """dq or dk, summed over the blocks of value heads that read the same key head."""
        x = x[:, : self.length].reshape(
            self.batch, self.length, self.key_heads, self.sharing, self.key_size
        )
        return x.sum(3)

    def split_value_heads(self, x: Float[Array, "B T HV*D"]) -> Float[Array, "B T HV D"]:
        """The inverse of `flat_tokens`, for tokens of value heads."""
        return x[:, : self.length].reshape(self.batch, self.length, self.value_heads, -1)

    def prefetched(
        self, chunk_document: Int[Array, "B chunks"] | None, packing: Packing | None
    ) -> tuple[Array | np.ndarray, ...]:
        """The scalar-prefetch operands.

        For each step the document whose state it reads and updates (with a state per document a
        step holds one chunk); for each step whether any of its rows is padding; for each chunk,
        with packing, the document of its last row.
        """
        documents: Array | np.ndarray = np.zeros((self.batch, self.steps), np.int32)
        chunk_ends = padding = documents
        if self.length % self.rows:
            padding = documents.copy()
            padding[:, -1] = 1
        if chunk_document is not None:
            documents = chunk_document
        if packing is not None:
            invalid = self._pad_time(~packing.valid, constant_values=True).astype(jnp.int32)
            padding = jnp.max(invalid.reshape(self.batch, self.steps, self.rows), axis=2)
            chunk_ends = self._pad_time(packing.document, mode="edge")[:, CHUNK - 1 :: CHUNK]
        return documents.reshape(-1), padding.reshape(-1), chunk_ends.reshape(-1)

    def row_documents(self, packing: Packing) -> Int[Array, "B 1 S"]:
        """Each row's document, or its bitwise complement (below 0) for a row of padding."""
        document = self._pad_time(packing.document, mode="edge")
        return jnp.where(self._pad_time(packing.valid), document, ~document)[:, None]

    def _pad_time(self, x: Array, **mode) -> Array:
        rest = [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, [(0, 0), (0, self.steps * self.rows - self.length), *rest], **mode)


def _largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, max(1, limit) + 1) if number % d == 0)


def _native_size(size: int, smallest: int) -> int:
    return smallest if size <= smallest else pl.cdiv(size, LANES) * LANES


def heads_per_block(
    value_heads: int, key_heads: int, sizes: tuple[int, int], limit: int
) -> int | None:
    """The most heads, at most `limit`, that make blocks of whole registers; None if no number does.

    Args:
        value_heads: HV.
        key_heads: H.
        sizes: of a key head and of a value head.
        limit: see `Tuning.heads`.
    """
    group = value_heads // key_heads
    key_size, value_size = sizes

    def fits(heads):
        block_key_heads = max(1, heads // group)
        return (
            (heads % group == 0 or group % heads == 0)
            and heads * value_size % LANES == 0
            and block_key_heads * key_size % LANES == 0
        )

    divisors = (d for d in range(1, limit + 1) if value_heads % d == 0)
    return max(filter(fits, divisors), default=None)


def pad_heads(x: Float[Array, "... D"], size: int) -> Float[Array, "... size"]:
    """Zeros up to the head size that the kernel takes; they change no result."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def flat_tokens(
    x: Float[Array, "B T heads D"], size: int, dtype: jnp.dtype
) -> Float[Array, "B T heads*size"]:
    """Tokens as the kernels take them, in heads of `size` and of at least a register's rows.

    The one row of T = 1 would get a layout of its own, whose loads take the compiler minutes and
    a v4 more than its vector memory.
    """
    x = pad_heads(x.astype(dtype), size).reshape(*x.shape[:2], -1)
    return jnp.pad(x, [(0, 0), (0, max(0, SUBLANES - x.shape[1])), (0, 0)])


def pad_states(x: Float[Array, "... K V"], blocks: Blocks) -> Float[Array, "... K' V'"]:
    """As `pad_heads`, both axes of a state."""
    last = [
        (0, size - n)
        for size, n in zip((blocks.key_size, blocks.value_size), x.shape[-2:], strict=True)
    ]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + last)


def chunk_rows(chunk: int) -> slice:
    return slice(chunk * CHUNK, (chunk + 1) * CHUNK)


def column(row: Array) -> Array:
    """`[1, CHUNK]` to `[CHUNK, CHUNK]`, entry i in all lanes of row i."""
    return jnp.broadcast_to(row, (CHUNK, CHUNK)).T


def lane(x: Array, index: int) -> Array:
    """One lane of `[CHUNK, lanes]`, in all lanes of `[CHUNK, CHUNK]`."""
    return jnp.broadcast_to(x[:, index : index + 1], (CHUNK, CHUNK))


def widen(x: Array, lanes: int) -> Array:
    """A column whose lanes are all alike, `[rows, LANES]`, as `[rows, lanes]`."""
    return jnp.concatenate([x] * (lanes // LANES), axis=1)


def iota(axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis)
