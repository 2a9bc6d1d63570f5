"""One decay per head and token, within a chunk of C tokens.

With G_i the sum of g over the chunk's tokens up to i, cumulated within i's document:

    pairs_ij = exp(G_i - G_j)   for j <= i in one document, else 0
    start_i  = exp(G_i)         if i's document began before the chunk, else 0
    end_j    = exp(G_C - G_j)   if j's document runs to the chunk's end, else 0
    total    = exp(G_C)         if one document fills the chunk, else 0

No exponent is above 0: masks come before exp, as upper bounds. The cumulation is a product with a
triangular matrix of zeros and ones. For float32 accuracy g = hi + lo with hi a multiple of 1/1024:
the sums of hi are exact while they stay above -16384 = -128 CHUNK, and so are their differences,
which else would carry the rounding of a large G.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..packing import CHUNK
from .blocks import column, iota, lane
from .dots import NT, dot


class Documents:
    """Which rows of a chunk share a document.

    Attributes:
        summed: 1 where j <= i in i's document, else 0: G = summed g.
        pairs: an upper bound of the exponents, 0 where `summed`, else far below.
        first: likewise for rows of the document that began before the chunk; None for all rows.
        last: likewise for rows of the document that runs to the chunk's end; None for all rows.
    """

    def __init__(self, document: Int[Array, "1 C"] | None = None, before: Int[Array, ""] | int = 0):
        """
        Args:
            document: of each row (see `Blocks.row_documents`); None where all share one.
            before: the document of the row before the chunk.
        """
        same = iota(0) >= iota(1)
        self.first = self.last = None
        if document is not None:
            document = jnp.maximum(document, ~document)
            documents = column(document)
            same &= documents == document
            self.first = _bound(documents == before)
            self.last = _bound(documents == documents[CHUNK - 1 :])
        self.summed = same.astype(jnp.bfloat16)
        self.pairs = _bound(same)


def _bound(mask: Bool[Array, "C C"]) -> Float[Array, "C C"]:
    return jnp.where(mask, 0.0, -1e30)


class HeadDecay(NamedTuple):
    """One head's factors, each as wide as a register: see the top of the file."""

    pairs: Float[Array, "C C"]
    start: Float[Array, "C C"]
    end: Float[Array, "C C"]
    total: Float[Array, "1 C"]


class ChunkDecay:
    """The decays of all heads of a block in one chunk."""

    def __init__(self, g: Float[Array, "heads C"], documents: Documents, exact: bool):
        """Cumulate g, from `SMALLEST_DECAY` to 0; `exact` for float32 accuracy at any decay."""
        self.documents = documents
        parts = split(g) if exact else (g,)
        self.rows = [dot(x, self.documents.summed, contraction=NT) for x in parts]
        self.columns = [x.T for x in self.rows]

    def head(self, head: int) -> HeadDecay:
        rows = [x[head : head + 1] for x in self.rows]
        columns = [lane(x, head) for x in self.columns]
        ends = [x[CHUNK - 1 :] for x in columns]
        pairs = sum(c - r for c, r in zip(columns, rows, strict=True))
        start = sum(columns)
        end = sum(e - c for e, c in zip(ends, columns, strict=True))
        documents = self.documents
        if documents.first is not None and documents.last is not None:
            start = jnp.minimum(start, documents.first)
            end = jnp.minimum(end, documents.last)
        pairs = jnp.exp(jnp.minimum(pairs, documents.pairs))
        start = jnp.exp(start)
        return HeadDecay(pairs, start, jnp.exp(end), start[CHUNK - 1 :])

    def ends(self) -> Float[Array, "C heads"]:
        """`end` of all heads, one in each lane."""
        end = sum(x[CHUNK - 1 :] - x for x in self.columns)
        if self.documents.last is not None:
            heads = self.columns[0].shape[1]
            end = jnp.minimum(end, self.documents.last[:, :heads])
        return jnp.exp(end)

    def gradient(self, d_cumulated: Float[Array, "heads C"]) -> Float[Array, "heads C"]:
        """The gradient of g from that of G."""
        return dot(d_cumulated, self.documents.summed)


def cumulated_gradient(
    by_row: Float[Array, "K C"], at_end: Float[Array, "1 1"]
) -> Float[Array, "1 C"]:
    """The gradient of G from summands of each row's, and from what the last row's has beside."""
    dG = jnp.sum(by_row, axis=0, keepdims=True)
    return jnp.where(iota(1)[:1] == CHUNK - 1, dG + at_end, dG)


def split(g: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """g as a multiple of 1/1024 and a small rest."""
    high = jnp.round(g * 1024) / 1024
    return high, g - high
