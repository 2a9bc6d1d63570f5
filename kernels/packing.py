"""Packed rows: several documents, and padding, in one row of tokens.

Both public notations (`segment_ids`, `cu_seqlens`) become a `Packing`. A call whose states are
per document is laid out anew, every document from a chunk's start (`Alignment`), so that the
chunked forms meet a document boundary in two ways only:

- inside a chunk, as a mask, when only the row's first document has an initial state;
- between chunks, as a change of state, when each document has its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 128
"""Tokens a chunk. 64 costs 4 to 20 % more on every TPU generation; 256 spans two registers."""


def poisoned_unless_rising(
    cu_seqlens: Int[Array, " N+1"], length: int
) -> tuple[Int[Array, " N+1"], Float[Array, ""]]:
    """Offsets that rise from 0 to at most `length`, and what a call adds to say if they are those.

    That is 0, or NaN where `cu_seqlens` does not rise so; the first document then is all tokens, so
    that a row whose initial state is NaN gives NaN throughout.
    """
    rises = (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= length)
    rises &= jnp.all(cu_seqlens[1:] >= cu_seqlens[:-1])
    one_document = jnp.full_like(cu_seqlens, length).at[0].set(0)
    return jnp.where(rises, cu_seqlens, one_document), jnp.where(rises, 0.0, jnp.nan)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Which document each token belongs to.

    Attributes:
        document: index of the token's document in its row, never decreasing along the row.
            A padding token carries the index of the document before it (0 at the row's start).
        valid: False for padding.
    """

    document: Int[Array, "B T"]
    valid: Bool[Array, "B T"]

    @classmethod
    def unpacked(cls, batch: int, length: int) -> "Packing":
        """Rows of one document each."""
        return cls(jnp.zeros((batch, length), jnp.int32), jnp.ones((batch, length), bool))

    @classmethod
    def from_segment_ids(cls, segment_ids: Int[Array, "B T"]) -> "Packing":
        """A document starts where the id differs from the token before; 0 is padding."""
        before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
        valid = segment_ids != 0
        starts = valid & (segment_ids != before)
        document = jnp.cumsum(starts, axis=1, dtype=jnp.int32) - 1
        return cls(jnp.maximum(document, 0), valid)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Array, " N+1"], length: int) -> "Packing":
        """Document n holds the tokens from `cu_seqlens[n]` up to `cu_seqlens[n + 1]`."""
        token = jnp.arange(length, dtype=jnp.int32)
        document = jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32)
        last = max(cu_seqlens.shape[0] - 2, 0)
        return cls(jnp.minimum(document, last)[None], (token < cu_seqlens[-1])[None])

    def lengths(self, num_documents: int) -> Int[Array, "B N"]:
        """Tokens of each document, padding not counted."""
        row = jnp.arange(self.document.shape[0])[:, None]
        counts = jnp.zeros((self.document.shape[0], num_documents), jnp.int32)
        return counts.at[row, self.document].add(self.valid.astype(jnp.int32), mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alignment:
    """A layout in which every document starts at a chunk's start.

    It has `(T + N (CHUNK - 1)) // CHUNK` chunks, the least that every split of T tokens into N
    documents fits in.

    Attributes:
        source: for each aligned slot the token that it holds, or T for an empty slot.
        target: for each token its slot, or the number of slots for a token that has none.
        chunk_document: each chunk's document, never decreasing along the row.
    """

    source: Int[Array, "B S"]
    target: Int[Array, "B T"]
    chunk_document: Int[Array, "B chunks"]

    @classmethod
    def of(cls, packing: Packing, num_documents: int) -> "Alignment":
        batch, length = packing.document.shape
        num_chunks = (length + num_documents * (CHUNK - 1)) // CHUNK
        num_slots = num_chunks * CHUNK
        chunks = -(-packing.lengths(num_documents) // CHUNK)
        chunk_end = jnp.cumsum(chunks, axis=1)
        token = jnp.arange(length, dtype=jnp.int32)
        starts = packing.valid & jnp.pad(
            (packing.document[:, 1:] != packing.document[:, :-1]) | ~packing.valid[:, :-1],
            ((0, 0), (1, 0)),
            constant_values=True,
        )
        first = jax.lax.cummax(jnp.where(starts, token, 0), axis=1)
        held = packing.valid & (packing.document < num_documents)
        document = jnp.minimum(packing.document, num_documents - 1)
        first_slot = jnp.take_along_axis(chunk_end - chunks, document, axis=1) * CHUNK
        target = jnp.where(held, first_slot + token - first, num_slots)
        row = jnp.arange(batch)[:, None]
        source = jnp.full((batch, num_slots), length, jnp.int32)
        source = source.at[row, target].set(token[None], mode="drop")
        count = jax.vmap(lambda end: jnp.searchsorted(end, jnp.arange(num_chunks), side="right"))
        chunk_document = jnp.minimum(count(chunk_end), num_documents - 1).astype(jnp.int32)
        return cls(source, target, chunk_document)

    def align(self, x: Array) -> Array:
        """Move `[B, T, ...]` to the aligned layout, empty slots 0."""
        return _gather_tokens(x, self.source, 0)

    def restore(self, x: Array) -> Array:
        """Move `[B, S, ...]` back to the tokens' order; a token that has no slot gets NaN."""
        return _gather_tokens(x, self.target, jnp.nan)


def zero_padding(x: Float[Array, "B T *D"], packing: Packing | None) -> Float[Array, "B T *D"]:
    """Zeros for padding tokens, whatever they held."""
    return x if packing is None else keep(packing.valid, x)


@jax.custom_vjp
def keep(valid: Bool[Array, "B T"], x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
    """x for the tokens that are valid, and zeros for the others.

    The backward pass reads `valid`; of `jnp.where` it would read a mask and zeros of x's shape.
    """
    return jnp.where(valid.reshape(x.shape[:2] + (1,) * (x.ndim - 2)), x, 0)


def _keep_forward(valid, x):
    return keep(valid, x), valid


def _keep_backward(valid, dy):
    return None, keep(valid, dy)


keep.defvjp(_keep_forward, _keep_backward)


def _gather_tokens(x: Array, index: Int[Array, "B I"], fill: float) -> Array:
    gather = jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=fill))
    return gather(x, index)
