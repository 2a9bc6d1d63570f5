"""What the chunked forms share whose decay is one number per key channel.

With G_i = g_1 + ... + g_i per key channel (within the document), their products of two rows are

    sum over channels of x_i exp(G_i - G_j) k_j            i >= j, both of one document, else 0

exp(G_i - G_j) does not factor into exp(G_i) exp(-G_j), which overflows. Let l be the highest bit
in which i and j differ (counted from 0 in the chunk): they are in the two halves of one block of
2^(l+1) rows, and the decay from j to i factors at the boundary between the halves into two decays,
neither above 1:

    e_l = exp(the sum of g between the row and the boundary of its block)
    A   = (e_l q) (e_l k)^T    for the pairs (i, j) of level l, q k^T on the diagonal

That is one product a level for all pairs of rows, of which each level keeps its own, and seven
levels. What g sums to between a row and a boundary is a product with a matrix of zeros and ones, so
that nothing cancels, and so is dg in terms of the gradients of all those sums.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..numerics import SMALLEST_DECAY, storage_dtype
from ..packing import CHUNK
from .blocks import chunks_to_tiles, tiles_to_chunks
from .chunks import Documents, Dots, group, l2norm, l2norm_gradient, ungroup

LEVELS = range(CHUNK.bit_length() - 1)
ROW, COLUMN = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None, :]

PAIRS = [(ROW ^ COLUMN) >> level == 1 for level in LEVELS]
"""The pairs of rows, in either order, that belong to each level."""

FIRST_ABOVE = [(ROW >> level | 1) << level for level in LEVELS]
"""For each level and row the first row of its block's upper half."""

# Which rows' g are summed, for each row: to the boundary in its block; from the chunk's start; to
# the chunk's end.
TO_BOUNDARY = [
    (np.minimum(ROW + 1, above) <= COLUMN) & (np.maximum(ROW, above - 1) >= COLUMN)
    for above in FIRST_ABOVE
]
FROM_START, TO_END = COLUMN <= ROW, COLUMN > ROW


@dataclasses.dataclass(frozen=True)
class ChannelDecay:
    """A chunk's decays, for one log decay per key channel and token.

    Attributes:
        levels: e_l, for each level.
        entering: e^G, 0 for rows that the entering state does not reach.
        leaving: e^(G_C - G), 0 for rows that do not reach the leaving state.
        passing: e^G_C, 0 if the state is not of one document.
        causal: the pairs of rows (i, j) with i >= j and of one document.
    """

    levels: list[Float[Array, "B H R N C K"]]
    entering: Float[Array, "B H R N C K"]
    leaving: Float[Array, "B H R N C K"]
    passing: Float[Array, "B H R N K"]
    causal: Bool[Array, "b 1 1 n C C"]

    @classmethod
    def of(cls, g: Float[Array, "B H R N C K"], documents: Documents, dots: Dots) -> "ChannelDecay":
        causal, enters, leaves, passes = (
            x[:, None, None]
            for x in (documents.causal, documents.enters, documents.leaves, documents.passes)
        )

        def decay(span):
            return jnp.exp(_sum_of(span, g, dots)).astype(dots.dtype)

        return cls(
            levels=[decay(span) for span in TO_BOUNDARY],
            entering=jnp.where(enters[..., None], decay(FROM_START), 0),
            leaving=jnp.where(leaves[..., None], decay(TO_END), 0),
            passing=jnp.where(passes[..., None], jnp.exp(jnp.sum(g, axis=-2)), 0),
            causal=causal,
        )


def _sum_of(span, g, dots):
    """For each row the sum of g over the rows of its span, to the accuracy of float32.

    With bfloat16 operands g is two of them, and exact to 1 / 2**17.
    """
    if dots.dtype != jnp.bfloat16:
        span = jnp.asarray(span, jnp.float32)
        return jnp.einsum("ij,...jk->...ik", span, g, precision=jax.lax.Precision.HIGHEST)
    coarse = g.astype(jnp.bfloat16)
    parts = jnp.concatenate([coarse, (g - coarse).astype(jnp.bfloat16)], axis=-2)
    return dots("ij,...jk->...ik", jnp.asarray(np.tile(span, 2)), parts)


def pair_products(x, k, diagonal, decay, dots):
    """The decayed products of x_i and k_j, and `diagonal` where i = j."""
    products = diagonal
    for pairs, e in zip(PAIRS, decay.levels, strict=True):
        products = jnp.where(pairs, dots("...ik,...jk->...ij", e * x, e * k), products)
    return jnp.where(decay.causal, products, 0)


# The gradients that pass through a decay, as terms (span, dx, dk): the part of dx and dk, and
# the rows whose g the decay's exponent sums. The exponent's gradient is x dx + k dk.


def pair_gradients(x, k, dproducts, decay, dots):
    """The terms of `pair_products`, off the diagonal, one for each level."""
    terms = []
    for pairs, span, e in zip(PAIRS, TO_BOUNDARY, decay.levels, strict=True):
        dlevel = jnp.where(pairs, dproducts, 0)
        dx = dots("...ij,...jk->...ik", dlevel, e * k)
        dk = dots("...ij,...ik->...jk", dlevel, e * x)
        terms.append((span, e * dx, e * dk))
    return terms


def log_decay_gradient(q, k, terms, decay, entered, dleft, dots):
    """The gradient of g, from the terms and from the state that passes through the chunk."""
    passed = decay.passing * jnp.sum(entered.astype(jnp.float32) * dleft, axis=-1)
    return passed[..., None, :] + sum(
        dots("ij,...ik->...jk", jnp.asarray(span), q * dq + k * dk) for span, dq, dk in terms
    )


def chunked(options, q, k, v, g):
    """One block's q (scaled), k, v and g in chunks, [B, H, R, N, C, D]; R is 1 for q and k."""
    q, k, v, g = (tiles_to_chunks(x) for x in (q, k, v, g))
    storage = storage_dtype(q, k, v)
    v, g = (group(x, q.shape[1]) for x in (v, g))
    q = options.scale * (l2norm(q) if options.qk_l2norm else q.astype(jnp.float32))
    k = l2norm(k) if options.qk_l2norm else k
    g = jnp.clip(g.astype(jnp.float32), SMALLEST_DECAY, 0)
    return q[:, :, None].astype(storage), k[:, :, None].astype(storage), v, g


def token_gradients(options, tokens, dq, dk, dv, dg, *dgates):
    """The gradients of a block's tokens from those of what `chunked` made of them."""
    dq, dk = options.scale * jnp.sum(dq, axis=2), jnp.sum(dk, axis=2)
    if options.qk_l2norm:
        dq = l2norm_gradient(tiles_to_chunks(tokens[0]), dq)
        dk = l2norm_gradient(tiles_to_chunks(tokens[1]), dk)
    dg = jnp.where(tiles_to_chunks(tokens[3]) > 0, 0, ungroup(dg))
    gradients = (dq, dk, ungroup(dv), dg, *map(ungroup, dgates))
    return tuple(
        chunks_to_tiles(dx.astype(x.dtype)) for dx, x in zip(gradients, tokens, strict=True)
    )
