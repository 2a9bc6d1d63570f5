"""Chunked SimpleGLA in plain JAX.

With the four decays of `chunks` (D, e^G, e^(G_C - G), e^G_C), s the scale, S the state that enters
a chunk and S' the one that leaves it, per chunk and value head:

    A  = s (q k^T) D
    o  = A v + s e^G (q S)
    S' = e^G_C S + (e^(G_C - G) k)^T v

Only the last line runs chunk by chunk. Saved for the backward pass: every S. From the gradients do
and dS' it computes

    dA = s (do v^T) D
    dS = e^G_C dS' + (s e^G q)^T do
    dv = A^T do + e^(G_C - G) (k dS')
    dq = dA k + s e^G (do S^T)
    dk = dA^T q + w                            w = e^(G_C - G) (v dS'^T)
    dG = rowsum(q dq - k dk), its last row plus sum(k w) + e^G_C sum(S dS')

where again only dS runs chunk by chunk, from the last to the first.
"""

import jax.numpy as jnp

from .chunks import (
    Documents,
    Dots,
    HeadDecay,
    carry_states,
    from_chunks,
    group,
    l2norm,
    l2norm_gradient,
    log_decay_gradient,
    storage_dtype,
    to_chunks,
    ungroup,
)


def forward(options, tokens, states, packing, chunk_document):
    """Outputs and new states; as residual the states that entered the chunks."""
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, v, g = _chunked(options, tokens, packing)
    decay = HeadDecay.of(g, Documents.of(packing))

    added = dots("bhrnjk,bhrnjv->bhrnkv", decay.leaving[..., None] * k[:, :, None], v)
    inputs = (broadcast_passing(decay.passing, added),)
    new_states, entered = carry_states(jnp.multiply, states, added, inputs, chunk_document)
    entered = entered.astype(storage_dtype(*tokens[:3]))
    attention = dots("bhnik,bhnjk->bhnij", q, k)[:, :, None] * decay.between
    o = dots("bhrnij,bhrnjv->bhrniv", attention, v)
    o += decay.entering[..., None] * dots("bhnik,bhrnkv->bhrniv", q, entered)
    o = (options.scale * o).astype(tokens[2].dtype)
    return (from_chunks(ungroup(o), tokens[2].shape[1], packing), new_states), {
        "states": ungroup(entered)
    }


def backward(options, tokens, states, packing, chunk_document, residuals, do, dfinal_states):
    """Gradients of tokens and states."""
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, v, g = _chunked(options, tokens, packing)
    documents = Documents.of(packing)
    decay = HeadDecay.of(g, documents)
    do = group(to_chunks(do, packing), q.shape[1])
    entered = group(residuals["states"], q.shape[1])
    entering, leaving = decay.entering[..., None], decay.leaving[..., None]

    added = dots("bhrnik,bhrniv->bhrnkv", options.scale * entering * q[:, :, None], do)
    inputs = (broadcast_passing(decay.passing, added),)
    dstates, dleft = carry_states(
        jnp.multiply, dfinal_states, added, inputs, chunk_document, reverse=True
    )
    dleft = dleft.astype(dots.dtype)
    between = options.scale * decay.between
    attention = dots("bhnik,bhnjk->bhnij", q, k)[:, :, None] * between
    dattention = (dots("bhrniv,bhrnjv->bhrnij", do, v) * between).astype(dots.dtype)
    dv = dots("bhrnij,bhrniv->bhrnjv", attention, do)
    dv += leaving * dots("bhnjk,bhrnkv->bhrnjv", k, dleft)
    dq = dots("bhrnij,bhnjk->bhrnik", dattention, k)
    dq += options.scale * entering * dots("bhrniv,bhrnkv->bhrnik", do, entered)
    dk_state = leaving * dots("bhrnjv,bhrnkv->bhrnjk", v, dleft)
    dk = dots("bhrnij,bhnik->bhrnjk", dattention, q) + dk_state
    q_grouped, k_grouped = q[:, :, None], k[:, :, None]
    dtotal = jnp.sum(q_grouped * dq - k_grouped * dk, axis=-1)
    dlast = jnp.sum(k_grouped * dk_state, axis=(-2, -1))
    dlast += decay.passing * jnp.sum(entered * dleft, axis=(-2, -1))
    dg = log_decay_gradient(dtotal, dlast, documents)
    dq, dk = jnp.sum(dq, axis=2), jnp.sum(dk, axis=2)
    if options.qk_l2norm:
        dq = l2norm_gradient(to_chunks(tokens[0], packing), dq)
        dk = l2norm_gradient(to_chunks(tokens[1], packing), dk)
    gradients = (dq, dk, ungroup(dv), ungroup(dg))
    dtokens = tuple(
        from_chunks(dx.astype(x.dtype), x.shape[1], packing)
        for dx, x in zip(gradients, tokens, strict=True)
    )
    return dtokens, dstates


def _chunked(options, tokens, packing):
    q, k, v, g = (to_chunks(x, packing) for x in tokens)
    if options.qk_l2norm:
        dtype = storage_dtype(*tokens[:3])
        q, k = l2norm(q).astype(dtype), l2norm(k).astype(dtype)
    return q, k, group(v, q.shape[1]), group(g, q.shape[1])


def broadcast_passing(passing, added):
    return jnp.broadcast_to(passing[..., None, None], (*added.shape[:4], 1, added.shape[-1]))
