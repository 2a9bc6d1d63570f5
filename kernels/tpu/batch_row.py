"""A batch row's part of a grid step: its documents and its padding."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool

from .blocks import Blocks, chunk_rows
from .decay import Documents


class BatchRow:
    """What the scalar-prefetch operands of `Blocks.prefetched` tell of a batch row."""

    def __init__(self, blocks: Blocks, index: int, prefetched, row_document):
        """
        Args:
            blocks: what the grid step holds.
            index: the row's, among those of the block.
            prefetched: refs of whole operands.
            row_document: a ref of the row's part of `Blocks.row_documents`; None without packing.
        """
        self.blocks = blocks
        self._index = index
        self._document, self._padding, self._chunk_ends = prefetched
        self._row_document = row_document
        self._chunk_documents: dict[int, Documents] = {}

    def document_ends(self) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        """Whether this grid step is its document's first, and whether it is the last, in time."""
        blocks = self.blocks
        time, step = self._time(), blocks.step(self._index)
        document = self._document[step]
        before = self._document[jnp.maximum(step - 1, 0)]
        after = self._document[jnp.minimum(step + 1, blocks.batch * blocks.steps - 1)]
        first = (time == 0) | (before != document)
        last = (time == blocks.steps - 1) | (after != document)
        return first, last

    def chunk_documents(self, chunk: int) -> Documents:
        """The documents of one of the row's chunks."""
        if chunk not in self._chunk_documents:
            self._chunk_documents[chunk] = self._documents(chunk)
        return self._chunk_documents[chunk]

    def _documents(self, chunk):
        if self._row_document is None:
            return Documents()
        first_chunk = (self._time() == 0) & (chunk == 0)
        index = self.blocks.step(self._index) * self.blocks.chunks + chunk
        before = self._chunk_ends[jnp.maximum(index - 1, 0)]
        rows = self._row_document[:, chunk_rows(chunk)]
        return Documents(rows, jnp.where(first_chunk, 0, before))

    def clear_padding(self, *tokens) -> None:
        """Zero the rows of token blocks that hold no valid token: their garbage may be NaN.

        In slabs of one packed register's rows, none of them in a step without padding.
        """
        blocks, row_document = self.blocks, self._row_document
        if row_document is None and blocks.length % blocks.rows == 0:
            return
        time = self._time()
        slab = (16, blocks.rows)

        def clear(i, _):
            token = i * slab[0] + jax.lax.broadcasted_iota(jnp.int32, slab, 0)
            if row_document is None:
                valid = (time * blocks.rows + token < blocks.length)[:, :1]
            else:
                here = token == jax.lax.broadcasted_iota(jnp.int32, slab, 1)
                here &= row_document[...] >= 0
                valid = jnp.sum(jnp.where(here, 1, 0), axis=1, keepdims=True) > 0
            for ref in tokens:
                rows = pl.ds(pl.multiple_of(i * slab[0], slab[0]), slab[0])
                ref[rows] = jnp.where(valid, ref[rows].astype(jnp.float32), 0).astype(ref.dtype)

        has_padding = self._padding[blocks.step(self._index)]
        jax.lax.fori_loop(0, has_padding * (blocks.rows // slab[0]), clear, None)

    def clear_missing_chunks(self, *refs) -> None:
        """Zero what blocks of `Blocks.per_chunk` hold past the last chunk: it may be NaN."""
        blocks = self.blocks
        missing = blocks.steps * blocks.chunks - blocks.num_chunks
        if not missing:
            return

        @pl.when(self._time() == blocks.steps - 1)
        def _():
            for ref in refs:
                shape = (blocks.heads, missing, *ref.shape[2:])
                ref[:, blocks.chunks - missing :] = jnp.zeros(shape, ref.dtype)

    def _time(self):
        return self.blocks.time(pl.program_id(2))
