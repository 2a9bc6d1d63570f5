"""Chunked GLA in plain JAX.

Per chunk and value head, with G_i = g_1 + ... + g_i per key channel (within the document), S the
state that enters the chunk and S' the one that leaves it, q scaled:

    A_ij = sum over channels of q_i exp(G_i - G_j) k_j     i >= j, both of one document, else 0
    o    = (q e^G) S + A v
    S'   = e^G_C S + E^T v                                 E = e^(G_C - G) k

The products with exp(G_i - G_j) are in `channel_decay.py`. Only the last line runs chunk by chunk.
Saved for the backward pass: every S and A. From the gradients do and dS' it computes

    dS = e^G_C dS' + (q e^G)^T do
    dv = A^T do + E dS'
    dA = do v^T                                            where A is not 0
    d(q e^G) = do S^T,  dE = v dS'^T

where again only dS runs chunk by chunk, from the last to the first. dg is a sum of gradients of
exponents, each a sum of g over rows, so that nothing cancels.
"""

import jax.numpy as jnp

from ..numerics import storage_dtype
from .blocks import by_blocks, chunks_to_tiles, tiles_to_chunks
from .channel_decay import (
    FROM_START,
    TO_END,
    ChannelDecay,
    chunked,
    log_decay_gradient,
    pair_gradients,
    pair_products,
    token_gradients,
)
from .chunks import Dots, carry_states, group, ungroup


def forward(options, states, tokens, documents, chunk_document):
    """Outputs and new states; as residuals the states that entered the chunks, and A."""
    storage = storage_dtype(*tokens[:3])
    dots = Dots.of(options, storage)
    q, k, v, g = chunked(options, *tokens)
    decay = ChannelDecay.of(g, documents, dots)

    added = dots("...ik,...iv->...kv", k * decay.leaving, v)
    inputs = (decay.passing[..., None],)
    new_states, entered = carry_states(jnp.multiply, states, added, inputs, chunk_document, storage)
    attention = pair_products(q, k, dots("...ik,...jk->...ij", q, k), decay, dots)
    attention = attention.astype(storage)
    rows = jnp.concatenate([attention, q * decay.entering], axis=-1)
    columns = jnp.concatenate([v.astype(storage), entered], axis=-2)
    o = dots("...ij,...jv->...iv", rows, columns).astype(tokens[2].dtype)
    residuals = {"states": ungroup(entered), "attention": ungroup(attention)}
    return chunks_to_tiles(ungroup(o)), new_states, residuals


def backward(options, dstates, tokens, documents, chunk_document, residuals, do):
    """Gradients of tokens and states."""
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, v, g = chunked(options, *tokens)
    decay = ChannelDecay.of(g, documents, dots)
    do, entered, attention = (
        group(x, q.shape[1])
        for x in (tiles_to_chunks(do), residuals["states"], residuals["attention"])
    )

    added = dots("...ik,...iv->...kv", q * decay.entering, do)
    inputs = (decay.passing[..., None],)
    dstates, dleft = carry_states(
        jnp.multiply, dstates, added, inputs, chunk_document, dots.dtype, reverse=True
    )

    dv = dots("...ij,...iv->...jv", attention, do)
    dv += dots("...ik,...kv->...iv", k * decay.leaving, dleft)
    dattention = dots("...iv,...jv->...ij", do, v)
    terms = [
        (FROM_START, decay.entering * dots("...iv,...kv->...ik", do, entered), 0),
        (TO_END, 0, decay.leaving * dots("...iv,...kv->...ik", v, dleft)),
        *pair_gradients(q, k, jnp.where(decay.causal, dattention, 0), decay, dots),
    ]
    own = jnp.sum(do.astype(jnp.float32) * v, axis=-1, keepdims=True)
    dq = own * k + sum(dq for _, dq, _ in terms)
    dk = own * q + sum(dk for _, _, dk in terms)
    dg = log_decay_gradient(q, k, terms, decay, entered, dleft, dots)
    return token_gradients(options, tokens, dq, dk, dv, dg), dstates


implementation = by_blocks(forward, backward)
