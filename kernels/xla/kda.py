"""Chunked KDA in plain JAX."""

import jax.numpy as jnp
import numpy as np

from ..packing import CHUNK
from .chunks import (
    SMALLEST_BETA,
    SMALLEST_DECAY,
    Documents,
    Dots,
    carry_states,
    from_chunks,
    group,
    l2norm,
    l2norm_gradient,
    storage_dtype,
    to_chunks,
    ungroup,
    unit_lower_inverse,
)


def _spans():
    row = np.arange(CHUNK)[:, None]
    other = np.arange(CHUNK)[None, :]
    between = []
    half = 1
    while half < CHUNK:
        boundary = row // (2 * half) * (2 * half) + half
        below = (boundary <= other) & (other <= row)
        above = (row < other) & (other < boundary)
        between.append(np.where(row >= boundary, below, above))
        half *= 2
    return between, other <= row, other > row


BETWEEN, BEFORE, AFTER = _spans()
LEVELS = len(BETWEEN)
DISTANCE = np.arange(CHUNK)[:, None] ^ np.arange(CHUNK)[None, :]
PAIRS = [(DISTANCE >> level) == 1 for level in range(LEVELS)]
EYE = np.eye(CHUNK, dtype=bool)


def _sum_over(dots, span, g):
    span = jnp.asarray(span)
    if dots.dtype == jnp.bfloat16:
        coarse = g.astype(jnp.bfloat16)
        g = jnp.concatenate([coarse, (g - coarse).astype(jnp.bfloat16)], axis=-2)
        span = jnp.concatenate([span, span], axis=1).astype(jnp.bfloat16)
        return jnp.einsum("ij,...jk->...ik", span, g, preferred_element_type=jnp.float32)
    return jnp.einsum("ij,...jk->...ik", span.astype(jnp.float32), g, precision="highest")


def _decays(dots, g, documents):
    def decay(span):
        return jnp.exp(_sum_over(dots, span, g)).astype(dots.dtype)

    e = [decay(x) for x in BETWEEN]
    entering = jnp.where(documents.enters[:, None, None, :, :, None], decay(BEFORE), 0)
    leaving = jnp.where(documents.leaves[:, None, None, :, :, None], decay(AFTER), 0)
    passing = jnp.exp(jnp.sum(g, axis=-2))
    passing = jnp.where(documents.passes[:, None, None, :, None], passing, 0)
    return e, entering, leaving, passing


def _attention(dots, q, k, e, causal):
    aq = ak = jnp.zeros((*e[0].shape[:-1], CHUNK))
    for pairs, x in zip(PAIRS, e, strict=True):
        aq = jnp.where(pairs, dots("...ik,...jk->...ij", q * x, k * x), aq)
        ak = jnp.where(pairs, dots("...ik,...jk->...ij", k * x, k * x), ak)
    diag = jnp.sum(q.astype(jnp.float32) * k, axis=-1)
    aq = jnp.where(EYE, diag[..., None], aq)
    return jnp.where(causal, aq, 0), jnp.where(causal & ~EYE, ak, 0)


def forward(options, tokens, states, packing, chunk_document):
    storage = storage_dtype(*tokens[:3])
    dots = Dots.of(options, storage)
    q, k, v, g, beta = _chunked(options, tokens, packing)
    documents = Documents.of(packing)
    causal = documents.causal[:, None, None]
    e, entering, leaving, passing = _decays(dots, g, documents)
    attention, m = _attention(dots, q, k, e, causal)
    inverse = unit_lower_inverse(beta * m, dots).astype(storage)
    attention = attention.astype(storage)

    read = beta * (k * entering)
    written = dots("...ij,...ik->...jk", inverse, k * leaving).astype(dots.dtype)
    forgotten = dots("...ik,...il->...kl", written, read).astype(dots.dtype)
    added = dots("...ik,...iv->...kv", written, beta * v)

    def step(state, forgotten, passing):
        return passing[..., None] * state - dots("...kl,...lv->...kv", forgotten, state)

    new_states, entered = carry_states(step, states, added, (forgotten, passing), chunk_document)
    entered = entered.astype(storage)
    x = beta * (v - dots("...ik,...kv->...iv", k * entering, entered))
    v_new = dots("...ij,...jv->...iv", inverse, x).astype(storage)
    o = dots("...ij,...jv->...iv", attention, v_new)
    o += dots("...ik,...kv->...iv", q * entering, entered)
    o = o.astype(tokens[2].dtype)
    residuals = {
        "states": entered,
        "inverse": jnp.swapaxes(inverse, -1, -2),
        "attention": jnp.swapaxes(attention, -1, -2),
        "v_new": v_new,
    }
    residuals = {name: ungroup(x) for name, x in residuals.items()}
    return (from_chunks(ungroup(o), tokens[2].shape[1], packing), new_states), residuals


def backward(options, tokens, states, packing, chunk_document, residuals, do, dfinal_states):
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, v, g, beta = _chunked(options, tokens, packing)
    documents = Documents.of(packing)
    causal = documents.causal[:, None, None]
    e, entering, leaving, passing = _decays(dots, g, documents)
    do = group(to_chunks(do, packing), q.shape[1])
    heads = tokens[1].shape[2]
    entered, inverse, attention, v_new = (
        group(residuals[name], heads) for name in ("states", "inverse", "attention", "v_new")
    )
    kg, qg, ke = k * entering, q * entering, k * leaving

    dv_new = dots("...ji,...iv->...jv", attention, do)
    read = dots("...ji,...jk->...ik", inverse, beta * kg).astype(dots.dtype)
    forgotten = dots("...ik,...il->...lk", ke, read).astype(dots.dtype)
    added = dots("...ik,...iv->...kv", qg, do) - dots("...ik,...iv->...kv", read, dv_new)

    def step(dstate, forgotten, passing):
        return passing[..., None] * dstate - dots("...kl,...lv->...kv", forgotten, dstate)

    inputs = (forgotten, passing)
    dstates, dleft = carry_states(step, dfinal_states, added, inputs, chunk_document, reverse=True)
    dleft = dleft.astype(dots.dtype)
    dv_new += dots("...ik,...kv->...iv", ke, dleft)
    de = dots("...ji,...iv->...jv", inverse, dv_new)
    dv = beta * de
    dbeta = jnp.sum(de * v_new, axis=-1, keepdims=True) / beta

    daq = jnp.where(causal, dots("...iv,...jv->...ij", do, v_new), 0).astype(dots.dtype)
    dak = jnp.where(causal & ~EYE, -dots("...iv,...jv->...ij", dv, v_new), 0).astype(dots.dtype)
    diag = jnp.sum(do.astype(jnp.float32) * v_new, axis=-1, keepdims=True)
    dqg = dots("...iv,...kv->...ik", do, entered)
    dkg = -dots("...iv,...kv->...ik", dv, entered)
    dke = dots("...iv,...kv->...ik", v_new, dleft)
    dq = diag * k + entering * dqg
    dk = diag * q + entering * dkg + leaving * dke
    dg = _sum_over(dots, BEFORE.T, qg * dqg + kg * dkg) + _sum_over(dots, AFTER.T, ke * dke)
    dg += (passing * jnp.sum(entered * dleft.astype(jnp.float32), axis=-1))[..., None, :]
    for pairs, span, x in zip(PAIRS, BETWEEN, e, strict=True):
        dlq = jnp.where(pairs, daq, 0)
        dlk = jnp.where(pairs, dak, 0)
        qx, kx = q * x, k * x
        dqx = dots("...ij,...jk->...ik", dlq, kx)
        dkx = dots("...ij,...jk->...ik", dlk + jnp.swapaxes(dlk, -1, -2), kx)
        dkx += dots("...ij,...ik->...jk", dlq, qx)
        dq += x * dqx
        dk += x * dkx
        dg += _sum_over(dots, span.T, qx * dqx + kx * dkx)
    dq, dk = options.scale * jnp.sum(dq, axis=2), jnp.sum(dk, axis=2)
    if options.qk_l2norm:
        dq = l2norm_gradient(to_chunks(tokens[0], packing), dq)
        dk = l2norm_gradient(to_chunks(tokens[1], packing), dk)
    gradients = (dq, dk, ungroup(dv), ungroup(dg), ungroup(dbeta[..., 0]))
    dtokens = tuple(
        from_chunks(dx.astype(x.dtype), x.shape[1], packing)
        for dx, x in zip(gradients, tokens, strict=True)
    )
    return dtokens, dstates


def _chunked(options, tokens, packing):
    q, k, v, g, beta = (to_chunks(x, packing) for x in tokens)
    dtype = storage_dtype(*tokens[:3])
    q = options.scale * (l2norm(q) if options.qk_l2norm else q.astype(jnp.float32))
    k = l2norm(k) if options.qk_l2norm else k
    v, g, beta = (group(x, q.shape[1]) for x in (v, g, beta))
    g = jnp.maximum(g.astype(jnp.float32), SMALLEST_DECAY)
    beta = beta.astype(jnp.float32)[..., None]
    beta = jnp.where(jnp.abs(beta) < SMALLEST_BETA, SMALLEST_BETA, beta)
    return q.astype(dtype)[:, :, None], k.astype(dtype)[:, :, None], v, g, beta
