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

Only the last line runs chunk by chunk. Saved for the backward pass: every S, T^T, A^T and u (the
TPU kernels save T and A as they are). From the gradients do and dS' it computes

    du = A^T do + E dS'
    de = T^T du                                            dv = beta de
    dS = e^G_C dS' + (q e^G)^T do - (k e^G)^T dv
       = e^G_C dS' - (beta k e^G)^T T^T E dS' + (q e^G)^T do - (beta k e^G)^T T^T A^T do
    dA = do u^T,  d(M / beta) = -dv u^T                    where A and M are not 0
    d(q e^G) = do S^T,  d(k e^G) = -dv S^T,  dE = u dS'^T
    dbeta = rowsum(de u) / beta

where again only dS runs chunk by chunk, from the last to the first. No gradient passes through the
inverse: (I + M) u = x is differentiated instead.

The products with exp(G_i - G_j) are in `channel_decay.py`.
"""

import jax.numpy as jnp

from ..numerics import divisible, storage_dtype
from .blocks import by_blocks, chunks_to_tiles, tiles_to_chunks
from .channel_decay import (
    FROM_START,
    PAIRS,
    TO_END,
    ChannelDecay,
    chunked,
    log_decay_gradient,
    pair_gradients,
    pair_products,
    token_gradients,
)
from .chunks import (
    Dots,
    carry_states,
    forget,
    group,
    solve_transposed,
    ungroup,
    unit_lower_inverse,
)


def forward(options, states, tokens, documents, chunk_document):
    """Outputs and new states; as residuals the states that entered the chunks, T^T, A^T and u."""
    storage = storage_dtype(*tokens[:3])
    dots = Dots.of(options, storage)
    q, k, v, g, beta = _chunked(options, *tokens)
    decay = ChannelDecay.of(g, documents, dots)
    attention, m = _attention(q, k, decay, dots)
    m = beta * m
    inverse = unit_lower_inverse(m, dots)
    attention = attention.astype(storage)

    read = k * decay.entering
    ends = (k * decay.leaving).astype(dots.dtype)
    written = solve_transposed(m, inverse, ends, dots).astype(dots.dtype)
    forgotten = dots("...ik,...il->...kl", written, beta * read)
    added = dots("...ik,...iv->...kv", written, beta * v)
    inputs = (forgotten.astype(dots.dtype), decay.passing)
    step = forget(dots)
    new_states, entered = carry_states(step, states, added, inputs, chunk_document, storage)

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
    q, k, _, g, beta = _chunked(options, *tokens)
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
    dstates, dleft = carry_states(
        step, dstates, added, inputs, chunk_document, dots.dtype, reverse=True
    )

    du += dots("...ik,...kv->...iv", kept, dleft)
    de = dots.fine("...ji,...iv->...jv", inverse, du.astype(dots.dtype))
    dv = beta * de
    dbeta = jnp.sum(de * u, axis=-1) / beta[..., 0]
    terms = _state_gradients(decay, entered, dleft, do, dv, u, dots)
    terms += _attention_gradients(q, k, decay, do, dv, u, dots)
    own = jnp.sum(do.astype(jnp.float32) * u, axis=-1, keepdims=True)
    dq = own * k + sum(dq for _, dq, _ in terms)
    dk = own * q + sum(dk for _, _, dk in terms)
    dg = log_decay_gradient(q, k, terms, decay, entered, dleft, dots)
    return token_gradients(options, tokens, dq, dk, dv, dg, dbeta), dstates


def _chunked(options, q, k, v, g, beta):
    beta = divisible(group(tiles_to_chunks(beta), k.shape[2])[..., None])
    return *chunked(options, q, k, v, g), beta


def _attention(q, k, decay, dots):
    """A and M / beta."""
    a = pair_products(q, k, dots("...ik,...jk->...ij", q, k), decay, dots)
    return a, pair_products(k, k, jnp.zeros_like(a), decay, dots)


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
    for (span, dq, dk), pairs, e in zip(
        pair_gradients(q, k, da, decay, dots), PAIRS, decay.levels, strict=True
    ):
        of_m = e * dots("...ij,...jk->...ik", jnp.where(pairs, dm, 0), e * k)
        terms.append((span, dq, dk + of_m))
    return terms


implementation = by_blocks(forward, backward)
