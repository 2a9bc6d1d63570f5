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
        if level == LEVELS and documents.first is not None and documents.last is not None:
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
    products: list[list[Array]] = []
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
    dscores: Float[Array, "2 C C"],
    masks: Float[Array, "2*LEVELS+1 C C"],
    dot: Product,
    scaled: Product,
) -> Generator[None, None, tuple[Array, Array, list[Array]]]:
    """dq, dk and each level's gradient of exponents, of `dscores` = (dA_q, dA_k)."""
    dlevels, dq = yield from _operand_gradients(levels, q, dscores, masks, dot, scaled)
    dk, exponents = jnp.zeros_like(k), []
    for level, (operands, gradients) in enumerate(zip(levels, dlevels, strict=False)):
        dquery, dreader = operands.since * gradients.queries, operands.since * gradients.readers
        dkey = operands.until * gradients.keys
        exponent = upper_rows(q, level) * dquery + upper_rows(k, level) * dreader
        if level:
            exponent = both_rows(lower_rows(k, level) * dkey, exponent, level)
        exponents.append(exponent)
        dq = add_upper(dq, dquery, level)
        dk += both_rows(dkey, dreader, level)
    return dq, dk, exponents


class _Gradients(NamedTuple):
    """Of a level's operands; those of the keys are of the lower rows."""

    queries: Float[Array, "rows K"]
    readers: Float[Array, "rows K"]
    keys: Float[Array, "rows K"]


def _operand_gradients(levels, q, dscores, masks, dot, scaled):
    """Of all levels' operands; and of q by A_q's diagonal."""
    dtype = levels[0].keys.dtype
    dscores = [x.astype(dtype) for x in dscores]
    transposed = [x.T for x in dscores]
    yield
    gradients = []
    for level, operands in enumerate(levels[:LEVELS]):
        mask, mask_t = masks[level], masks[LEVELS + 1 + level]
        pairs = [scaled(upper_rows(x, level), upper_rows(mask, level)) for x in dscores]
        pairs_t = [scaled(lower_rows(x, level), lower_rows(mask_t, level)) for x in transposed]
        reads = [operands.queries, operands.readers]
        if level >= TILE_LEVELS:
            reads = [both_rows(x, x, level) for x in reads]
        if level == 0:
            pairs.append(scaled(dscores[0], masks[LEVELS]))
            pairs_t.append(scaled(transposed[0], masks[LEVELS]))
            reads.append(q.astype(dtype))
        dreads = dot(jnp.concatenate(pairs), operands.keys)
        yield
        dkeys = dot(jnp.concatenate(pairs_t, axis=1), jnp.concatenate(reads))
        yield
        dqueries, dreaders, *own = jnp.split(dreads, len(pairs))
        gradients.append(_Gradients(dqueries, dreaders, dkeys))
        if level == 0:
            (dq,) = own
    return gradients, dq
