"""The inverse of a unit lower triangular matrix, T = (I + M)^-1 with M [C, C] strictly lower.

The diagonal blocks of 16 x 16 are inverted by substitution, then pairs of blocks are merged, to
32, 64 and 128 rows:

    [T1   0]        [I + M1      0  ]^-1
    [X   T2]    =   [  N      I + M2]         X = -T2 (N T1)

Blocks of one size lie side by side, in an array "in blocks" [size, C]: entry (i, j) is row i of the
block that j is a column of. So a level takes two products, whatever its number of blocks.

T is needed to float32 accuracy even where all else is bfloat16. Repeated keys without decay make
its rows alternate and cancel, and rounding, being the same in every row, then adds up over the
chunk: with T rounded to bfloat16, o is wrong by 0.1 for seven keys over and over at beta 1.9, and
by 0.9 for one. A series in powers of M has terms that reach 1e17 and cancel; here nothing does.
"""

from collections.abc import Generator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..packing import CHUNK
from .blocks import SUBLANES
from .dots import PIECES, dot, pieces

BASE = 16
"""Two registers high: a larger block costs more steps, a smaller one another pair of products."""


def triangular_inverse(
    m: Float[Array, "C C"], precision: jax.lax.Precision | None
) -> Generator[None, None, Float[Array, "C C"]]:
    """Invert I + M; yields after each product, see `lockstep`.

    Args:
        m: M; what it holds on and above the diagonal is not read.
        precision: of the products. HIGH leaves an error of 1e-5, None 1e-7.
    """
    inverse = yield from _substitute(_diagonal_blocks(m, BASE))
    while inverse.shape[0] < CHUNK:
        inverse = yield from _merge(inverse, m, precision)
    return inverse


def _substitute(blocks: Float[Array, "16 C"]) -> Generator[None, None, Float[Array, "16 C"]]:
    """Column after column: row i of T = row i of I - sum over j < i of M_ij row j of T."""
    row, lane = _iota(BASE, 0), _iota(BASE, 1)
    column = lane % BASE
    coefficients = _registers(jnp.where(row > column, blocks, 0.0))
    inverse = _registers(jnp.where(row == column, 1.0, 0.0))
    for j in range(BASE - 1):
        done = inverse[j // SUBLANES][j % SUBLANES :][:1]
        for i in range((j + 1) // SUBLANES, len(inverse)):
            spread = jnp.take_along_axis(coefficients[i], (lane - column + j)[:SUBLANES], axis=1)
            inverse[i] -= spread * done
        if j % 5 == 4:
            yield
    return jnp.concatenate(inverse, axis=0)


def _merge(inverse: Float[Array, "S C"], m, precision):
    """From the inverses of blocks of S rows to those of 2 S rows."""
    size = inverse.shape[0]
    first = _iota(size, 1) // size % 2 == 0
    upper, lower = jnp.where(first, inverse, 0.0), jnp.where(first, 0.0, inverse)
    below = pieces(_halves(_blocks_below(m, size), 0), PIECES[precision])
    second = pieces(_halves(inverse, 1), PIECES[precision])
    written = _product(below, pieces(upper, PIECES[precision]))
    yield
    merged = _product(second, pieces(written, PIECES[precision]))
    yield
    return jnp.concatenate([upper, lower - merged], axis=0)


def _product(left: list[Float[Array, "S C/2"]], right: list[Float[Array, "S C"]]):
    """The product of blocks, left side by side, right in the first places of all pairs.

    Two pieces each make four terms, of depth 256 together: the last one costs nothing.
    """
    terms = [(x, _spread(y)) for j, y in enumerate(right) for i, x in enumerate(left) if i + j < 3]
    lefts, rights = zip(*terms, strict=True)
    return dot(jnp.concatenate(lefts, axis=1), jnp.concatenate(rights, axis=0))


def _diagonal_blocks(m: Float[Array, "C C"], size: int) -> Float[Array, "S C"]:
    lane = _iota(size, 1)
    blocks = m[:size]
    for start in range(size, CHUNK, size):
        blocks = jnp.where(lane >= start, m[start : start + size], blocks)
    return blocks


def _blocks_below(m: Float[Array, "C C"], size: int) -> Float[Array, "S C"]:
    """In the place of each first block of a pair, the block below it."""
    lane = _iota(size, 1)
    blocks = m[size : 2 * size]
    for start in range(2 * size, CHUNK, 2 * size):
        blocks = jnp.where(lane >= start, m[start + size : start + 2 * size], blocks)
    return blocks


def _halves(x: Float[Array, "S C"], second: int) -> Float[Array, "S C/2"]:
    """The first, or the second, blocks of all pairs, moved together."""
    size = x.shape[0]
    half = CHUNK // 2
    if size == half:
        return x[:, half:] if second else x[:, :half]
    lane = _iota(size, 1) % half
    source = lane + lane // size * size + second * size
    return jnp.take_along_axis(x, source, axis=1)[:, :half]


def _spread(x: Float[Array, "S C"]) -> Float[Array, "C/2 C"]:
    """The first blocks of all pairs, each in rows of its own."""
    size = x.shape[0]
    pair = _iota(size, 1) // (2 * size)
    pairs = range(CHUNK // (2 * size))
    return jnp.concatenate([jnp.where(pair == p, x, jnp.zeros_like(x)) for p in pairs], axis=0)


def _registers(x: Float[Array, "S C"]) -> list[Float[Array, "8 C"]]:
    return [x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES)]


def _iota(rows: int, axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (rows, CHUNK), axis)
