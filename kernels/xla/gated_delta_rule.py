"""Chunked gated delta rule in plain JAX.

With the four decays of `chunks` (D, e^G, e^(G_C - G), e^G_C), s the scale, S the state that enters
a chunk and S' the one that leaves it, per chunk and value head:

    M  = strict(k k^T) D beta_j               beta_j scales columns: what is written is beta u
    T  = (I + M)^-1
    u  = T x                                  x = v - e^G (k S)
    o  = A u + s e^G (q S)                    A = s (q k^T) D beta_j
    S' = e^G_C S + E^T u                      E = beta e^(G_C - G) k
       = e^G_C S - (E^T T e^G k) S + E^T T v

Only the last line runs chunk by chunk. Saved for the backward pass: every S, T^T and x, u being
one product away. From the gradients do and dS' it computes

    du = A^T do + E dS'
    dx = T^T du
    dS = e^G_C dS' - (E^T T e^G k)^T dS' + (s e^G q)^T do - (T e^G k)^T A^T do
    dA = s (do u^T) D beta_j
    dM = -strict(dx u^T) D beta_j
    dv = dx
    dq = dA k + s e^G (do S^T)
    dk = r + w + dA^T q + dM^T k              r = dM k - e^G (dx S^T)
                                              w = beta e^(G_C - G) (u dS'^T)
    dG = rowsum(q dq + k (2 r + w - dk)) - y, its last row plus sum(y) + e^G_C sum(S dS')
                                              y = rowsum(u (E dS')) = rowsum(k w)
    dbeta = rowsum(u dx) / beta

where again only dS runs chunk by chunk, from the last to the first. No gradient passes through the
inverse: (I + M) u = x is differentiated instead. T is multiplied in float32: repeated keys without
decay make its rows cancel. The sums of y make up most of dg, so that its u and dS' are not rounded
to bfloat16: dg is off by 1.6e-3 on random inputs, in place of 7.0e-3.
"""

import jax.numpy as jnp

from ..numerics import divisible, storage_dtype
from .blocks import by_blocks, chunks_to_tiles, tiles_to_chunks
from .chunks import (
    Dots,
    HeadDecay,
    carry_states,
    computed_once,
    forget,
    group,
    l2norm,
    l2norm_gradient,
    log_decay_gradient,
    solve_transposed,
    ungroup,
    unit_lower_inverse,
)


def forward(options, states, tokens, documents, chunk_document):
    """Outputs and new states; as residuals the states that entered the chunks, T^T and x."""
    storage = storage_dtype(*tokens[:3])
    dots = Dots.of(options, storage)
    q, k, v, g, beta = _chunked(options, tokens)
    decay = HeadDecay.of(g, documents, dots.dtype)
    between = decay.between * beta[..., None, :]
    entering, leaving = decay.entering[..., None], (beta * decay.leaving)[..., None]

    m = jnp.tril(dots("...ik,...jk->...ij", k, k), -1) * between
    inverse = unit_lower_inverse(m, dots)
    ends = (leaving * k).astype(dots.dtype)
    written = solve_transposed(m, inverse, ends, dots).astype(dots.dtype)
    forgotten = dots("...ik,...il->...kl", written, entering * k).astype(dots.dtype)
    added = dots("...ik,...iv->...kv", written, v)
    inputs = (forgotten, decay.passing[..., None])
    step = forget(dots)
    new_states, entered = carry_states(step, states, added, inputs, chunk_document, storage)

    x = (v - entering * dots("...ik,...kv->...iv", k, entered)).astype(storage)
    u = dots.fine("...ij,...jv->...iv", inverse, x)
    attention = dots("...ik,...jk->...ij", q, k) * between
    attention = computed_once(attention.astype(dots.dtype))
    o = dots("...ij,...jv->...iv", attention, u)
    o += entering * dots("...ik,...kv->...iv", q, entered)
    o = (options.scale * o).astype(tokens[2].dtype)
    residuals = {"states": entered, "inverse": jnp.swapaxes(inverse, -1, -2), "x": x}
    residuals = {name: ungroup(x) for name, x in residuals.items()}
    return chunks_to_tiles(ungroup(o)), new_states, residuals


def backward(options, dstates, tokens, documents, chunk_document, residuals, do):
    """Gradients of tokens and states."""
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, _, g, beta = _chunked(options, tokens)
    decay = HeadDecay.of(g, documents, dots.dtype)
    do = group(tiles_to_chunks(do), q.shape[1])
    entered, inverse, x = (
        group(residuals[name], q.shape[1]) for name in ("states", "inverse", "x")
    )
    u = dots.fine("...ji,...jv->...iv", inverse, x)
    between = decay.between * beta[..., None, :]
    entering, leaving = decay.entering[..., None], (beta * decay.leaving)[..., None]

    attention = options.scale * dots("...ik,...jk->...ij", q, k) * between
    attention = computed_once(attention.astype(dots.dtype))
    du = dots("...ij,...iv->...jv", attention, do)
    starts = (entering * k).astype(dots.dtype)
    read = dots.fine("...ji,...jk->...ik", inverse, starts).astype(dots.dtype)
    forgotten = dots("...ik,...il->...lk", leaving * k, read).astype(dots.dtype)
    added = dots("...ik,...iv->...kv", options.scale * entering * q, do)
    added -= dots("...ik,...iv->...kv", read, du)
    inputs = (forgotten, decay.passing[..., None])
    step = forget(dots)
    dstates, dleft = carry_states(
        step, dstates, added, inputs, chunk_document, jnp.float32, reverse=True
    )
    du_state = leaving * dots.fine("...jk,...kv->...jv", k, dleft)
    du += du_state
    dx = dots.fine("...ji,...iv->...jv", inverse, du.astype(dots.dtype))
    dattention = (options.scale * dots("...iv,...jv->...ij", do, u) * between).astype(dots.dtype)
    dm = (-jnp.tril(dots("...iv,...jv->...ij", dx, u), -1) * between).astype(dots.dtype)
    dq = dots("...ij,...jk->...ik", dattention, k)
    dq += options.scale * entering * dots("...iv,...kv->...ik", do, entered)
    dk_read = dots("...ij,...jk->...ik", dm, k)
    dk_read -= entering * dots("...iv,...kv->...ik", dx, entered)
    dk_state = leaving * dots("...jv,...kv->...jk", u, dleft)
    dk_write = dots("...ij,...ik->...jk", dattention, q)
    dk_write += dots("...ij,...ik->...jk", dm, k)

    to_state = jnp.sum(u * du_state, axis=-1)
    dtotal = jnp.sum(q * dq + k * (dk_read - dk_write), axis=-1) - to_state
    dlast = jnp.sum(to_state, axis=-1)
    dlast += decay.passing * jnp.sum(entered * dleft, axis=(-2, -1))
    dg = log_decay_gradient(dtotal, dlast, documents)
    dbeta = jnp.sum(u * dx, axis=-1) / beta
    dq, dk = jnp.sum(dq, axis=2), jnp.sum(dk_read + dk_write + dk_state, axis=2)
    if options.qk_l2norm:
        dq = l2norm_gradient(tiles_to_chunks(tokens[0]), dq)
        dk = l2norm_gradient(tiles_to_chunks(tokens[1]), dk)
    gradients = (dq, dk, ungroup(dx), ungroup(dg), ungroup(dbeta))
    dtokens = tuple(
        chunks_to_tiles(dx.astype(x.dtype)) for dx, x in zip(gradients, tokens, strict=True)
    )
    return dtokens, dstates


def _chunked(options, tokens):
    q, k, v, g, beta = (tiles_to_chunks(x) for x in tokens)
    v, g, beta = (group(x, q.shape[1]) for x in (v, g, beta))
    if options.qk_l2norm:
        dtype = storage_dtype(q, k, v)
        q, k = l2norm(q).astype(dtype), l2norm(k).astype(dtype)
    return q[:, :, None], k[:, :, None], v, g, divisible(beta)


implementation = by_blocks(forward, backward)
