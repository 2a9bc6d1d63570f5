"""A key head's queries and keys, divided by their norms or not, and the storing of dq and dk.

A head's dq and dk are summed over the value heads of a block that read it, in float32.
"""

from types import SimpleNamespace

from jaxtyping import Array, Float

from .blocks import Blocks
from .heads import HeadWriter, Sums, read_head
from .norm import normalize, normalize_gradient

Norms = tuple[Float[Array, "C 1"] | None, Float[Array, "C 1"] | None]
"""What q and k were multiplied by, or None for each."""


def read_keys(
    refs: SimpleNamespace, chunk: int, head: int, blocks: Blocks, *, qk_l2norm: bool
) -> tuple[Float[Array, "C lanes"], Float[Array, "C lanes"], Norms]:
    """A key head out of blocks of q and k; in float32 where it is divided by its norms."""
    queries, keys = (read_head(x, chunk, head, blocks.key_size) for x in (refs.q, refs.k))
    if not qk_l2norm:
        return queries, keys, (None, None)
    (queries, query_norms), (keys, key_norms) = normalize(queries), normalize(keys)
    return queries, keys, (query_norms, key_norms)


class KeyGradientWriter:
    """Stores dq and dk of a key head when the last value head that reads it has added its part."""

    def __init__(self, dq, dk, blocks: Blocks):
        self._writers = [HeadWriter(ref, blocks.key_size) for ref in (dq, dk)]
        self._readers = min(blocks.group, blocks.heads)
        self._sums = Sums()

    def add(
        self,
        chunk: int,
        head: int,
        keys: tuple[Float[Array, "C lanes"], Float[Array, "C lanes"]],
        norms: Norms,
        *gradients: Float[Array, "C lanes"],
    ) -> None:
        """Add one value head's dq and dk.

        Args:
            chunk: of the block.
            head: the key head.
            keys: its q and k, as `read_keys` gave them.
            norms: likewise.
            *gradients: of q and k as they were given.
        """
        sums = self._sums.add((chunk, head), self._readers, *gradients)
        if sums is None:
            return
        for writer, x, norm, gradient in zip(self._writers, keys, norms, sums, strict=True):
            if norm is not None:
                gradient = normalize_gradient(x, norm, gradient)
            writer.write(chunk, head, gradient)
