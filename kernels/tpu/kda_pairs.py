"""KDA's products between the tokens of a chunk, and their gradients.

For queries and keys [C, K] with decays between row i and column j (`channel_decay.py`):

    A_q = q k^T on and below the diagonal            A_k = k k^T below the diagonal

Their gradients dA_q and dA_k give, per level of `channel_decay.py`, with the operands
q since, k since of upper and k until of lower halves:

    d(q since) = dA_q (k until)      d(k since) = dA_k (k until)
    d(k until) = dA_q^T (q since) + dA_k^T (k since)

The decay's exponent in row i has the gradient of a product with its factor, times that factor. Each
exponent is a sum of some of the chunk's g, so dg is a product of zeros and ones with the gradients
of all exponents. Nothing cancels in it, so that a tiny dg is as accurate as a large one.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .blocks import widen
from .channel_decay import (
    LEVELS,
    TILE_LEVELS,
    add_upper,
    both_rows,
    halving,
    join_pairs,
    lower_rows,
    upper_rows,
)
from .decay import Documents
from .dots import NT
from .tuning import vector_dtype

Product = Callable[..., Array]


class Decayed(NamedTuple):
    """One level's operands and their factors; rows are the level's upper or lower ones."""

    since: Float[Array, "rows K"]
    until: Float[Array, "rows K"]
    queries: Float[Array, "rows K"]
    readers: Float[Array, "rows K"]
    keys: Float[Array, "C K"]


def scaling(dtype: jnp.dtype) -> Product:
    """Multiplication of operands by factors, with results of `dtype`."""
    wide = vector_dtype(dtype)
    return lambda x, factor: (x.astype(wide) * factor.astype(wide)).astype(dtype)


def decay_tokens(
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    g: Float[Array, "C K"],
    documents: Documents,
    scaled: Product,
) -> list[Decayed]:
    """The operands of all levels; the last are those of the whole chunk, for all rows.

    In these, rows whose document did not begin before, or does not last to the end, are 0.
    """
    levels = []
    for level, (since, until) in enumerate(halving(jnp.exp(jnp.minimum(g, 0.0)))):
        if level == LEVELS and documents.first is not None:
            size = g.shape[1]
            since = jnp.where(widen(documents.first, size) < 0, 0.0, since)
            until = jnp.where(widen(documents.last, size) < 0, 0.0, until)
        keys = scaled(k, until)
        if level < LEVELS:
            since, until = upper_rows(since, level), lower_rows(until, level)
            queries, readers = (scaled(upper_rows(x, level), since) for x in (q, k))
        else:
            queries, readers = scaled(q, since), scaled(k, since)
        levels.append(Decayed(since, until, queries, readers, keys))
    return levels


def scores(
    levels: list[Decayed], own: Float[Array, "C K"], dot: Product
) -> Generator[None, None, tuple[Array, Array]]:
    """A_q and A_k. `own` are the queries without a decay, for the diagonal."""
    products = []
    for level in levels[:LEVELS]:
        reads = [level.queries, level.readers]
        if not products:
            reads.append(own)
        product = dot(jnp.concatenate(reads), level.keys, contraction=NT)
        yield
        products.append(jnp.split(product, len(reads)))
    of_queries, of_keys = ([x[i] for x in products] for i in (0, 1))
    return join_pairs(of_queries, products[0][2]), join_pairs(of_keys)


def score_gradients(
    levels: list[Decayed],
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    d_scores: tuple[Float[Array, "C C"], Float[Array, "C C"]],
    masks: Float[Array, "2*LEVELS+1 C C"],
    dot: Product,
    scaled: Product,
) -> Generator[None, None, tuple[Array, Array, list[Array]]]:
    """dq, dk and the exponents' gradients, level by level, of `d_scores` = (dA_q, dA_k)."""
    dtype = levels[0].keys.dtype
    d_scores = [x.astype(dtype) for x in d_scores]
    transposed = [x.T for x in d_scores]
    yield
    d_reads, d_keys = [], []
    for level, operands in enumerate(levels[:LEVELS]):
        mask, mask_t = masks[level], masks[LEVELS + 1 + level]
        pairs = [scaled(upper_rows(x, level), upper_rows(mask, level)) for x in d_scores]
        pairs_t = [scaled(lower_rows(x, level), lower_rows(mask_t, level)) for x in transposed]
        reads = [operands.queries, operands.readers]
        if level >= TILE_LEVELS:
            reads = [both_rows(x, x, level) for x in reads]
        if level == 0:
            pairs.append(scaled(d_scores[0], masks[LEVELS]))
            pairs_t.append(scaled(transposed[0], masks[LEVELS]))
            reads.append(q.astype(dtype))
        d_reads.append(dot(jnp.concatenate(pairs), operands.keys))
        yield
        d_keys.append(dot(jnp.concatenate(pairs_t, axis=1), jnp.concatenate(reads)))
        yield
    d_queries, d_readers, dq = jnp.split(d_reads[0], 3)
    dk, exponents = jnp.zeros_like(k), []
    for level, operands in enumerate(levels[:LEVELS]):
        if level:
            d_queries, d_readers = jnp.split(d_reads[level], 2)
        d_query, d_reader = operands.since * d_queries, operands.since * d_readers
        d_key = operands.until * d_keys[level]
        exponent = upper_rows(q, level) * d_query + upper_rows(k, level) * d_reader
        if level:
            exponent = both_rows(lower_rows(k, level) * d_key, exponent, level)
        exponents.append(exponent)
        dq = add_upper(dq, d_query, level)
        dk += both_rows(d_key, d_reader, level)
    return dq, dk, exponents
