"""Chunked KDA in plain JAX.

Per chunk and value head, with G_i = g_1 + ... + g_i per key channel (within the document), S the
state that enters the chunk and S' the one that leaves it, q scaled:

    A_ij = sum over channels of q_i exp(G_i - G_j) k_j     i >= j, both of one document, else 0
    M_ij = beta_i sum of k_i exp(G_i - G_j) k_j            i > j, likewise
    T    = (I + M)^-1
    u    = T x                                             x = beta (v - (k e^G) S)
    o    = (q e^G) S + A u
    S'   = e^G_C S + E^T u                                 E = e^(G_C - G) k
         = e^G_C S - (E^T T beta k e^G) S + E^T T beta v

Only the last line runs chunk by chunk. Saved for the backward pass: every S, T, A and u. From the
gradients do and dS' it computes

    du = A^T do + E dS'
    de = T^T du                                            dv = beta de
    dS = e^G_C dS' + (q e^G)^T do - (k e^G)^T dv
       = e^G_C dS' - (beta k e^G)^T T^T E dS' + (q e^G)^T do - (beta k e^G)^T T^T A^T do
    dA = do u^T,  d(M / beta) = -dv u^T                    where A and M are not 0
    d(q e^G) = do S^T,  d(k e^G) = -dv S^T,  dE = u dS'^T
    dbeta = rowsum(de u) / beta

where again only dS runs chunk by chunk, from the last to the first. No gradient passes through the
inverse: (I + M) u = x is differentiated instead.

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

from ..numerics import SMALLEST_DECAY, divisible, storage_dtype
from ..packing import CHUNK
from .blocks import by_blocks, chunks_to_tiles, tiles_to_chunks
from .chunks import (
    Documents,
    Dots,
    carry_states,
    forget,
    group,
    l2norm,
    l2norm_gradient,
    ungroup,
    unit_lower_inverse,
)

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


def forward(options, states, tokens, documents, chunk_document):
    """Outputs and new states; as residuals the states that entered the chunks, T^T, A^T and u."""
    storage = storage_dtype(*tokens[:3])
    dots = Dots.of(options, storage)
    q, k, v, g, beta = _chunked(options, tokens)
    decay = ChannelDecay.of(g, documents, dots)
    attention, m = _attention(q, k, decay, dots)
    inverse = unit_lower_inverse(beta * m, dots)
    attention = attention.astype(storage)

    read = k * decay.entering
    ends = (k * decay.leaving).astype(dots.dtype)
    written = dots.fine("...ij,...ik->...jk", inverse, ends).astype(dots.dtype)
    forgotten = dots("...ik,...il->...kl", written, beta * read)
    added = dots("...ik,...iv->...kv", written, beta * v)
    inputs = (forgotten.astype(dots.dtype), decay.passing)
    step = forget(dots)
    new_states, entered = carry_states(step, states, added, inputs, chunk_document)
    entered = entered.astype(storage)

    x = beta * (v - dots("...ik,...kv->...iv", read, entered))
    u = dots.fine("...ij,...jv->...iv", inverse, x.astype(dots.dtype)).astype(storage)
    rows = jnp.concatenate([attention, q * decay.entering], axis=-1)
    o = dots("...ij,...jv->...iv", rows, jnp.concatenate([u, entered], axis=-2))
    residuals = {
        "states": entered,
        "inverse": jnp.swapaxes(inverse, -1, -2),
        "attention": jnp.swapaxes(attention, -1, -2),
        "v_new": u,
    }
    residuals = {name: ungroup(x) for name, x in residuals.items()}
    return chunks_to_tiles(ungroup(o).astype(tokens[2].dtype)), new_states, residuals


def backward(options, dstates, tokens, documents, chunk_document, residuals, do):
    """Gradients of tokens and states."""
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, _, g, beta = _chunked(options, tokens)
    decay = ChannelDecay.of(g, documents, dots)
    do = group(tiles_to_chunks(do), q.shape[1])
    entered, inverse, attention, u = (
        group(residuals[name], q.shape[1]) for name in ("states", "inverse", "attention", "v_new")
    )
    kept = k * decay.leaving

    du = dots("...ji,...iv->...jv", attention, do)
    starts = (beta * (k * decay.entering)).astype(dots.dtype)
    w = dots.fine("...ji,...jk->...ik", inverse, starts).astype(dots.dtype)
    forgotten = dots("...ik,...il->...lk", kept, w)
    added = dots("...ik,...iv->...kv", q * decay.entering, do)
    added -= dots("...ik,...iv->...kv", w, du)
    inputs = (forgotten.astype(dots.dtype), decay.passing)
    step = forget(dots)
    dstates, dleft = carry_states(step, dstates, added, inputs, chunk_document, reverse=True)
    dleft = dleft.astype(dots.dtype)

    du += dots("...ik,...kv->...iv", kept, dleft)
    de = dots.fine("...ji,...iv->...jv", inverse, du.astype(dots.dtype))
    dv = beta * de
    dbeta = jnp.sum(de * u, axis=-1) / beta[..., 0]
    terms = _state_gradients(decay, entered, dleft, do, dv, u, dots)
    terms += _attention_gradients(q, k, decay, do, dv, u, dots)
    own = jnp.sum(do.astype(jnp.float32) * u, axis=-1, keepdims=True)
    dq = own * k + sum(dq for _, dq, _ in terms)
    dk = own * q + sum(dk for _, _, dk in terms)
    dg = decay.passing * jnp.sum(entered.astype(jnp.float32) * dleft, axis=-1)
    dg = dg[..., None, :] + sum(_sum_back(span, q * dq + k * dk, dots) for span, dq, dk in terms)
    dq, dk = options.scale * jnp.sum(dq, axis=2), jnp.sum(dk, axis=2)
    if options.qk_l2norm:
        dq = l2norm_gradient(tiles_to_chunks(tokens[0]), dq)
        dk = l2norm_gradient(tiles_to_chunks(tokens[1]), dk)
    dg = jnp.where(tiles_to_chunks(tokens[3]) > 0, 0, ungroup(dg))
    gradients = (dq, dk, ungroup(dv), dg, ungroup(dbeta))
    dtokens = tuple(
        chunks_to_tiles(dx.astype(x.dtype)) for dx, x in zip(gradients, tokens, strict=True)
    )
    return dtokens, dstates


def _chunked(options, tokens):
    q, k, v, g, beta = (tiles_to_chunks(x) for x in tokens)
    storage = storage_dtype(q, k, v)
    v, g, beta = (group(x, q.shape[1]) for x in (v, g, beta))
    q = options.scale * (l2norm(q) if options.qk_l2norm else q.astype(jnp.float32))
    k = l2norm(k) if options.qk_l2norm else k
    g = jnp.clip(g.astype(jnp.float32), SMALLEST_DECAY, 0)
    beta = divisible(beta[..., None])
    return q[:, :, None].astype(storage), k[:, :, None].astype(storage), v, g, beta


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


def _sum_back(span, dsum, dots):
    """The gradient of g from that of its sums."""
    return dots("ij,...ik->...jk", jnp.asarray(span), dsum)


def _attention(q, k, decay, dots):
    """A and M / beta."""
    a = dots("...ik,...jk->...ij", q, k)
    m = jnp.zeros_like(a)
    for pairs, e in zip(PAIRS, decay.levels, strict=True):
        eq, ek = e * q, e * k
        a = jnp.where(pairs, dots("...ik,...jk->...ij", eq, ek), a)
        m = jnp.where(pairs, dots("...ik,...jk->...ij", ek, ek), m)
    return jnp.where(decay.causal, a, 0), jnp.where(decay.causal, m, 0)


# The gradients that pass through a decay, as terms (span, dq, dk): the part of dq and dk, and
# the rows whose g the decay's exponent sums. The exponent's gradient is q dq + k dk.


def _state_gradients(decay, entered, dleft, do, dv, u, dots):
    """The terms of q e^G, k e^G and E."""
    dq = decay.entering * dots("...iv,...kv->...ik", do, entered)
    dk = -decay.entering * dots("...iv,...kv->...ik", dv, entered)
    dk_kept = decay.leaving * dots("...iv,...kv->...ik", u, dleft)
    return [(FROM_START, dq, dk), (TO_END, jnp.zeros_like(dq), dk_kept)]


def _attention_gradients(q, k, decay, do, dv, u, dots):
    """The terms of A and M, one for each level.

    They are summed over the levels in float32: rounded to bfloat16 before, dg is off by 5.2e-3
    where channels of decay 0 and -30 mix, in place of 4.6e-3.
    """
    da = jnp.where(decay.causal, dots("...iv,...jv->...ij", do, u), 0).astype(dots.dtype)
    dm = jnp.where(decay.causal, -dots("...iv,...jv->...ij", dv, u), 0).astype(dots.dtype)
    dm += jnp.swapaxes(dm, -1, -2)
    terms = []
    for pairs, span, e in zip(PAIRS, TO_BOUNDARY, decay.levels, strict=True):
        eq, ek = e * q, e * k
        da_level, dm_level = jnp.where(pairs, da, 0), jnp.where(pairs, dm, 0)
        dq = dots("...ij,...jk->...ik", da_level, ek)
        dk = dots("...ij,...jk->...ik", dm_level, ek) + dots("...ij,...ik->...jk", da_level, eq)
        terms.append((span, e * dq, e * dk))
    return terms


implementation = by_blocks(forward, backward)
