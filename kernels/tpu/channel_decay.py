"""A decay per key channel and token, within a chunk of C tokens: exact at any strength.

With a_t = exp(g_t), per channel, and for blocks of 2^l tokens, l = 0, ..., log2 C:

    since_l[i] = a_b ... a_i            b the first token of i's block
    until_l[j] = a_{j+1} ... a_e        e the last token of j's block; 1 where j = e

Two tokens j < i of a chunk are, for one l, in the lower and the upper half of a block of 2^(l+1):
l is the highest bit in which i and j differ. The decay between them is since_l[i] until_l[j], so

    sum_c x_ic y_jc (a_{j+1} ... a_i)_c  =  sum_c (x * since_l)_ic (y * until_l)_jc

is one matrix product per level, in which the pairs with (i xor j) >> l == 1 and i > j count. Each
factor is a product of some of the a_t and so at most 1, none is a quotient, and none depends on a
token outside of its block: there is nothing to clamp, g = -inf included, nothing cancels, and a
token never reads a rounding of what follows it.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..packing import CHUNK
from .blocks import SUBLANES
from .tuning import has_sublane_gather

LEVELS = CHUNK.bit_length() - 1
TILE_LEVELS = SUBLANES.bit_length() - 1
"""Levels whose pairs lie within a register's 8 rows. At these, rows are not separated by halves."""


def halving(decay: Float[Array, "C K"]) -> Iterator[tuple[Array, Array]]:
    """Yield (since_l, until_l) for l = 0, ..., LEVELS; the last pair is that of the whole chunk."""
    since, until = decay, jnp.ones_like(decay)
    for level in range(LEVELS):
        yield since, until
        double = _double_in_tiles if level < TILE_LEVELS else _double
        since, until = double(since, until, level)
    yield since, until


def _double(since, until, level):
    since_lower, since_upper = _halves(since, level)
    until_lower, until_upper = _halves(until, level)
    until_lower = until_lower * since_upper[:, -1:]
    since_upper = since_upper * since_lower[:, -1:]
    return _whole(since_lower, since_upper), _whole(until_lower, until_upper)


def _double_in_tiles(since, until, level):
    half = 1 << level
    tiles = (CHUNK // SUBLANES, SUBLANES, since.shape[1])
    since, until = since.reshape(tiles), until.reshape(tiles)
    row = jax.lax.broadcasted_iota(jnp.int32, tiles, 1)
    other_half = _last_of_other_half(since, row, half)
    upper = row & half != 0
    since = jnp.where(upper, since * other_half, since)
    until = jnp.where(upper, until, until * other_half)
    return since.reshape(CHUNK, -1), until.reshape(CHUNK, -1)


def _last_of_other_half(x, row, half):
    """For each row of a tile the last row of its block's other half."""
    if has_sublane_gather():
        return jnp.take_along_axis(x, ((row & -half) ^ half) | (half - 1), axis=1)
    picked = jnp.zeros_like(x)
    for start in range(0, SUBLANES, half):
        last = (start ^ half) | (half - 1)
        picked = jnp.where(row & -half == start, x[:, last : last + 1], picked)
    return picked


def _halves(x, level):
    blocks = x.reshape(-1, 2 << level, x.shape[1])
    return blocks[:, : 1 << level], blocks[:, 1 << level :]


def _whole(lower, upper):
    return jnp.concatenate([lower, upper], axis=1).reshape(CHUNK, -1)


def lower_rows(x: Float[Array, "C D"], level: int) -> Float[Array, "rows D"]:
    """The rows of lower halves; within tiles all rows."""
    return x if level < TILE_LEVELS else _halves(x, level)[0].reshape(CHUNK // 2, -1)


def upper_rows(x: Float[Array, "C D"], level: int) -> Float[Array, "rows D"]:
    """The rows of upper halves; within tiles all rows."""
    return x if level < TILE_LEVELS else _halves(x, level)[1].reshape(CHUNK // 2, -1)


def both_rows(
    lower: Float[Array, "rows D"], upper: Float[Array, "rows D"], level: int
) -> Float[Array, "C D"]:
    """All rows from those of the halves; within tiles, where the other half's are 0, their sum."""
    if level < TILE_LEVELS:
        return lower + upper
    blocks = (-1, 1 << level, lower.shape[1])
    return _whole(lower.reshape(blocks), upper.reshape(blocks))


def add_upper(
    x: Float[Array, "C D"], upper: Float[Array, "rows D"], level: int
) -> Float[Array, "C D"]:
    """Add to the rows of upper halves."""
    if level < TILE_LEVELS:
        return x + upper
    return both_rows(lower_rows(x, level), upper_rows(x, level) + upper, level)


def join_pairs(
    products: list[Float[Array, "rows C"]], own: Float[Array, "C C"] | float = 0.0
) -> Float[Array, "C C"]:
    """From each level's product of upper with all rows the pairs that count, and own's diagonal."""
    tiles = (CHUNK // SUBLANES, SUBLANES, CHUNK)
    row = jax.lax.broadcasted_iota(jnp.int32, (1, *tiles[1:]), 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, *tiles[1:]), 2) % SUBLANES
    pairs = jnp.where(row == lane, jnp.broadcast_to(own, (CHUNK, CHUNK)).reshape(tiles), 0.0)
    for level in range(TILE_LEVELS):
        counts = ((row ^ lane) >> level == 1) & (row > lane)
        pairs = jnp.where(counts, products[level].reshape(tiles), pairs)
    pairs = jnp.where(_lane_blocks(TILE_LEVELS, 1), pairs, 0.0).reshape(CHUNK, CHUNK)
    for level in range(TILE_LEVELS, LEVELS):
        lower, upper = _halves(pairs, level)
        product = products[level].reshape(upper.shape)
        pairs = _whole(lower, jnp.where(_lane_blocks(level, 2), product, upper))
    return pairs


def _lane_blocks(level, stride):
    """Whether a lane is in block `stride * n` of 2^level lanes, `[n, 1, C]`."""
    shape = (CHUNK // (stride << level), 1, CHUNK)
    block = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 2) >> level == stride * block


def pair_masks(dtype: jax.typing.DTypeLike) -> Float[Array, "2*LEVELS+1 C C"]:
    """1 where a pair (i, j) counts, for each level; on the diagonal; where (j, i) counts."""
    level, i, j = _indices(LEVELS)
    counts = ((i ^ j) >> level == 1) & (i > j)
    diagonal = (i == j)[:1]
    return jnp.concatenate([counts, diagonal, jnp.swapaxes(counts, 1, 2)]).astype(dtype)


def token_ranges(dtype: jax.typing.DTypeLike) -> Float[Array, "C (LEVELS+1)*C"]:
    """1 where a_s is a factor of row i's decay; the axes are s, and i for each of several decays.

    These are of levels 1, ..., LEVELS - 1 (`since` for rows of upper, `until` for rows of lower
    halves), then `since` and `until` of the whole chunk. Those of level 0 are a_i and 1.
    """
    level, s, i = _indices(LEVELS + 1)
    upper = (i >> level) & 1 == 1
    within = (s >> level == i >> level) & ((s <= i) == upper)
    whole = jnp.where(level == 0, s > i, s <= i)
    ranges = jnp.where((level == 0) | (level == LEVELS), whole, within)
    ranges = jnp.concatenate([ranges[1:], ranges[:1]])
    return jnp.swapaxes(ranges, 0, 1).reshape(CHUNK, -1).astype(dtype)


def _indices(levels):
    shape = (levels, CHUNK, CHUNK)
    return (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
