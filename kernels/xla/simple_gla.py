"""Chunked SimpleGLA in plain JAX.

With the four decays of `chunks` (D, e^G, e^(G_C - G), e^G_C), s the scale, S the state that enters
a chunk and S' the one that leaves it, per chunk and value head:

    A  = s (q k^T) D
    o  = A v + s e^G (q S)
    S' = e^G_C S + (e^(G_C - G) k)^T v

Only the last line runs chunk by chunk. Saved for the backward pass: every S. From the gradients dO
and dS' it computes, with do = s dO,

    dA = (do v^T) D
    dS = e^G_C dS' + (e^G q)^T do
    dv = A^T do + e^(G_C - G) (k dS')           A = (q k^T) D
    dq = dA k + e^G (do S^T)
    dk = dA^T q + w                            w = e^(G_C - G) (v dS'^T)
    dG = rowsum(q dq - k dk), its last row plus sum(k w) + e^G_C sum(S dS')

where again only dS runs chunk by chunk, from the last to the first.
"""

import jax.numpy as jnp

from ..numerics import storage_dtype
from .blocks import by_blocks, chunks_to_tiles, tiles_to_chunks
from .chunks import (
    Dots,
    HeadDecay,
    carry_states,
    computed_once,
    group,
    l2norm,
    l2norm_gradient,
    log_decay_gradient,
    ungroup,
)


def forward(options, states, tokens, documents, chunk_document):
    """Outputs and new states; as residual the states that entered the chunks."""
    storage = storage_dtype(*tokens[:3])
    dots = Dots.of(options, storage)
    q, k, v, g = _chunked(options, tokens)
    decay = HeadDecay.of(g, documents, dots.dtype)

    added = dots("...jk,...jv->...kv", decay.leaving[..., None] * k, v)
    inputs = (decay.passing[..., None, None],)
    new_states, entered = carry_states(jnp.multiply, states, added, inputs, chunk_document, storage)
    attention = dots("...ik,...jk->...ij", q, k) * decay.between
    attention = computed_once(attention.astype(dots.dtype))
    o = dots("...ij,...jv->...iv", attention, v)
    o += decay.entering[..., None] * dots("...ik,...kv->...iv", q, entered)
    o = (options.scale * o).astype(tokens[2].dtype)
    return chunks_to_tiles(ungroup(o)), new_states, {"states": ungroup(entered)}


def backward(options, dstates, tokens, documents, chunk_document, residuals, do):
    """Gradients of tokens and states."""
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, v, g = _chunked(options, tokens)
    decay = HeadDecay.of(g, documents, dots.dtype)
    do = group(tiles_to_chunks(do), q.shape[1])
    do = (options.scale * do).astype(dots.dtype)
    entered = group(residuals["states"], q.shape[1])
    entering, leaving = decay.entering[..., None], decay.leaving[..., None]

    added = dots("...ik,...iv->...kv", entering * q, do)
    inputs = (decay.passing[..., None, None],)
    dstates, dleft = carry_states(
        jnp.multiply, dstates, added, inputs, chunk_document, dots.dtype, reverse=True
    )
    attention = dots("...ik,...jk->...ij", q, k) * decay.between
    attention = computed_once(attention.astype(dots.dtype))
    dattention = (dots("...iv,...jv->...ij", do, v) * decay.between).astype(dots.dtype)
    dv = dots("...ij,...iv->...jv", attention, do)
    dv += leaving * dots("...jk,...kv->...jv", k, dleft)
    dq = dots("...ij,...jk->...ik", dattention, k)
    dq += entering * dots("...iv,...kv->...ik", do, entered)
    dk_state = leaving * dots("...jv,...kv->...jk", v, dleft)
    dk = dots("...ij,...ik->...jk", dattention, q) + dk_state
    dtotal = jnp.sum(q * dq - k * dk, axis=-1)
    dlast = jnp.sum(k * dk_state, axis=(-2, -1))
    dlast += decay.passing * jnp.sum(entered * dleft, axis=(-2, -1))
    dg = log_decay_gradient(dtotal, dlast, documents)
    dq, dk = jnp.sum(dq, axis=2), jnp.sum(dk, axis=2)
    if options.qk_l2norm:
        dq = l2norm_gradient(tiles_to_chunks(tokens[0]), dq)
        dk = l2norm_gradient(tiles_to_chunks(tokens[1]), dk)
    gradients = (dq, dk, ungroup(dv), ungroup(dg))
    dtokens = tuple(
        chunks_to_tiles(dx.astype(x.dtype)) for dx, x in zip(gradients, tokens, strict=True)
    )
    return dtokens, dstates


def _chunked(options, tokens):
    q, k, v, g = (tiles_to_chunks(x) for x in tokens)
    v, g = (group(x, q.shape[1]) for x in (v, g))
    if options.qk_l2norm:
        dtype = storage_dtype(q, k, v)
        q, k = l2norm(q).astype(dtype), l2norm(k).astype(dtype)
    return q[:, :, None], k[:, :, None], v, g


implementation = by_blocks(forward, backward)
