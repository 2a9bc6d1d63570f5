"""One decay per head and token, within a chunk of C tokens.

With G_i the sum of g over the chunk's tokens up to i, cumulated within i's document:

    pairs_ij = exp(G_i - G_j)   for j <= i in one document, else 0
    start_i  = exp(G_i)         if i's document began before the chunk, else 0
    end_j    = exp(G_C - G_j)   if j's document runs to the chunk's end, else 0
    total    = exp(G_C)         if one document fills the chunk, else 0

No exponent is above 0: masks come before exp. The cumulation is a product with a triangular matrix
of zeros and ones. For float32 accuracy g = hi + lo with hi a multiple of 1/1024: the sums of hi
are exact while they stay above -16384 = -128 CHUNK, and so are their differences, which else would
carry the rounding of a large G.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..packing import CHUNK
from .blocks import column, iota
from .dots import EXACT, NT, dot

LOWEST = -128.0
"""exp of it is exactly 0 in float32: a decay below acts the same."""

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Documents:
    """Which rows of a chunk share a document.

    Attributes:
        pairs: j <= i, in i's document.
        first: rows of the document that began before the chunk, or None for all rows.
        last: rows of the document that runs to the chunk's end, or None for all rows.
    """

    pairs: Bool[Array, "C C"]
    first: Bool[Array, "C C"] | None = None
    last: Bool[Array, "C C"] | None = None

    @classmethod
    def of(cls, run: Int[Array, "1 C"] | None) -> "Documents":
        """From the row's run numbers (see `Blocks.document_runs`), or None for one document."""
        causal = iota(0) >= iota(1)
        if run is None:
            return cls(causal)
        runs = column(run)
        return cls(causal & (runs == run), runs == 0, runs == runs[CHUNK - 1 :])


class HeadDecay(NamedTuple):
    """One head's factors, each as wide as a register: see the top of the file."""

    pairs: Float[Array, "C C"]
    start: Float[Array, "C C"]
    end: Float[Array, "C C"]
    total: Float[Array, "1 C"]


class ChunkDecay:
    """The decays of all heads of a block in one chunk."""

    def __init__(self, g: Float[Array, "heads C"], documents: Documents, exact: bool):
        """Cumulate g, at least `LOWEST`; `exact` for float32 accuracy at any decay."""
        self.documents = documents
        self.summed = documents.pairs.astype(jnp.float32)
        parts = split(g) if exact else (g,)
        self.rows = [dot(x, self.summed, EXACT, NT) for x in parts]
        self.columns = [x.T for x in self.rows]

    def head(self, head: int) -> HeadDecay:
        rows = [x[head : head + 1] for x in self.rows]
        columns = [jnp.broadcast_to(x[:, head : head + 1], (CHUNK, CHUNK)) for x in self.columns]
        ends = [x[CHUNK - 1 :] for x in columns]
        documents = self.documents
        pairs = sum(c - r for c, r in zip(columns, rows, strict=True))
        start = sum(columns)
        end = sum(e - c for e, c in zip(ends, columns, strict=True))
        if documents.first is not None:
            start = jnp.where(documents.first, start, MASKED)
            end = jnp.where(documents.last, end, MASKED)
        pairs = jnp.exp(jnp.where(documents.pairs, pairs, MASKED))
        start = jnp.exp(start)
        return HeadDecay(pairs, start, jnp.exp(end), start[CHUNK - 1 :])

    def gradient(self, d_cumulated: Float[Array, "heads C"]) -> Float[Array, "heads C"]:
        """The gradient of g from that of G."""
        return dot(d_cumulated, self.summed, EXACT)


def split(g: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """g as a multiple of 1/1024 and a small rest."""
    high = jnp.round(g * 1024) / 1024
    return high, g - high
