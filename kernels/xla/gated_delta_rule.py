"""Chunked gated delta rule in plain JAX.

With the four decays of `chunks` (D, e^G, e^(G_C - G), e^G_C), s the scale, S the state that enters
a chunk and S' the one that leaves it, per chunk and value head:

    M  = strict(k k^T) D beta_j               beta_j scales columns: what is written is beta u
    T  = (I + M)^-1
    u  = T x                                  x = v - e^G (k S)
    o  = A u + s e^G (q S)                    A = s (q k^T) D beta_j
    S' = e^G_C S + E^T u                      E = beta e^(G_C - G) k
       = e^G_C S - (E^T T e^G k) S + E^T T v

Only the last line runs chunk by chunk. Saved for the backward pass: every S, T^T and u. From the
gradients do and dS' it computes

    du = A^T do + E dS'
    dx = T^T du
    dS = e^G_C dS' - (E^T T e^G k)^T dS' + (s e^G q)^T do - (T e^G k)^T A^T do
    dA = s (do u^T) D beta_j
    dM = -strict(dx u^T) D beta_j
    dv = dx
    dq = dA k + s e^G (do S^T)
    dk = r + w + dA^T q + dM^T k              r = dM k - e^G (dx S^T)
                                              w = beta e^(G_C - G) (u dS'^T)
    dG = rowsum(q dq + k (2 r - dk)), its last row plus sum(k w) + e^G_C sum(S dS')
    dbeta = rowsum(u dx) / beta

where again only dS runs chunk by chunk, from the last to the first. No gradient passes through the
inverse: (I + M) u = x is differentiated instead.
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
    unit_lower_inverse,
)


def forward(options, tokens, states, packing, chunk_document):
    """Outputs and new states; as residuals the states that entered the chunks, T^T and u."""
    storage = storage_dtype(*tokens[:3])
    dots = Dots.of(options, storage)
    q, k, v, g, beta = _chunked(options, tokens, packing)
    decay = HeadDecay.of(g, Documents.of(packing))
    between = decay.between * beta[..., None, :]
    entering, leaving = decay.entering[..., None], (beta * decay.leaving)[..., None]

    m = jnp.tril(dots("bhnik,bhnjk->bhnij", k, k), -1)[:, :, None] * between
    inverse = unit_lower_inverse(m, dots)
    k_grouped = k[:, :, None]
    written = dots("bhrnij,bhrnik->bhrnjk", inverse, leaving * k_grouped).astype(dots.dtype)
    forgotten = dots("bhrnik,bhrnil->bhrnkl", written, entering * k_grouped).astype(dots.dtype)
    added = dots("bhrnik,bhrniv->bhrnkv", written, v)

    def step(state, forgotten, passing):
        return passing * state - dots("bhrkl,bhrlv->bhrkv", forgotten, state)

    inputs = (forgotten, broadcast_passing(decay.passing, added))
    new_states, entered = carry_states(step, states, added, inputs, chunk_document)
    entered = entered.astype(storage)
    x = v - entering * dots("bhnik,bhrnkv->bhrniv", k, entered)
    u = dots("bhrnij,bhrnjv->bhrniv", inverse, x).astype(storage)
    attention = dots("bhnik,bhnjk->bhnij", q, k)[:, :, None] * between
    o = dots("bhrnij,bhrnjv->bhrniv", attention, u)
    o += entering * dots("bhnik,bhrnkv->bhrniv", q, entered)
    o = (options.scale * o).astype(tokens[2].dtype)
    residuals = {"states": entered, "inverse": jnp.swapaxes(inverse, -1, -2), "u": u}
    residuals = {name: ungroup(x) for name, x in residuals.items()}
    return (from_chunks(ungroup(o), tokens[2].shape[1], packing), new_states), residuals


def backward(options, tokens, states, packing, chunk_document, residuals, do, dfinal_states):
    """Gradients of tokens and states."""
    dots = Dots.of(options, storage_dtype(*tokens[:3]))
    q, k, _, g, beta = _chunked(options, tokens, packing)
    documents = Documents.of(packing)
    decay = HeadDecay.of(g, documents)
    do = group(to_chunks(do, packing), q.shape[1])
    entered, inverse, u = (
        group(residuals[name], q.shape[1]) for name in ("states", "inverse", "u")
    )
    between = decay.between * beta[..., None, :]
    entering, leaving = decay.entering[..., None], (beta * decay.leaving)[..., None]
    q_grouped, k_grouped = q[:, :, None], k[:, :, None]

    attention = options.scale * dots("bhnik,bhnjk->bhnij", q, k)[:, :, None] * between
    du = dots("bhrnij,bhrniv->bhrnjv", attention, do)
    read = dots("bhrnji,bhrnjk->bhrnik", inverse, entering * k_grouped).astype(dots.dtype)
    forgotten = dots("bhrnik,bhrnil->bhrnlk", leaving * k_grouped, read).astype(dots.dtype)
    added = dots("bhrnik,bhrniv->bhrnkv", options.scale * entering * q_grouped, do)
    added -= dots("bhrnik,bhrniv->bhrnkv", read, du)

    def step(dstate, forgotten, passing):
        return passing * dstate - dots("bhrkl,bhrlv->bhrkv", forgotten, dstate)

    inputs = (forgotten, broadcast_passing(decay.passing, added))
    dstates, dleft = carry_states(step, dfinal_states, added, inputs, chunk_document, reverse=True)
    dleft = dleft.astype(dots.dtype)
    du += leaving * dots("bhnjk,bhrnkv->bhrnjv", k, dleft)
    dx = dots("bhrnji,bhrniv->bhrnjv", inverse, du)
    dattention = (options.scale * dots("bhrniv,bhrnjv->bhrnij", do, u) * between).astype(dots.dtype)
    dm = (-jnp.tril(dots("bhrniv,bhrnjv->bhrnij", dx, u), -1) * between).astype(dots.dtype)
    dq = dots("bhrnij,bhnjk->bhrnik", dattention, k)
    dq += options.scale * entering * dots("bhrniv,bhrnkv->bhrnik", do, entered)
    dk_read = dots("bhrnij,bhnjk->bhrnik", dm, k)
    dk_read -= entering * dots("bhrniv,bhrnkv->bhrnik", dx, entered)
    dk_state = leaving * dots("bhrnjv,bhrnkv->bhrnjk", u, dleft)
    dk_write = dots("bhrnij,bhnik->bhrnjk", dattention, q)
    dk_write += dots("bhrnij,bhnik->bhrnjk", dm, k) + dk_state

    dtotal = jnp.sum(q_grouped * dq + k_grouped * (dk_read - dk_write), axis=-1)
    dlast = jnp.sum(k_grouped * dk_state, axis=(-2, -1))
    dlast += decay.passing * jnp.sum(entered * dleft, axis=(-2, -1))
    dg = log_decay_gradient(dtotal, dlast, documents)
    dbeta = jnp.sum(u * dx, axis=-1) / beta
    dq, dk = jnp.sum(dq, axis=2), jnp.sum(dk_read + dk_write, axis=2)
    if options.qk_l2norm:
        dq = l2norm_gradient(to_chunks(tokens[0], packing), dq)
        dk = l2norm_gradient(to_chunks(tokens[1], packing), dk)
    gradients = (dq, dk, ungroup(dx), ungroup(dg), ungroup(dbeta))
    dtokens = tuple(
        from_chunks(dx.astype(x.dtype), x.shape[1], packing)
        for dx, x in zip(gradients, tokens, strict=True)
    )
    return dtokens, dstates


def broadcast_passing(passing, added):
    return jnp.broadcast_to(passing[..., None, None], (*added.shape[:4], 1, added.shape[-1]))


def _chunked(options, tokens, packing):
    q, k, v, g, beta = (to_chunks(x, packing) for x in tokens)
    if options.qk_l2norm:
        dtype = storage_dtype(*tokens[:3])
        q, k = l2norm(q).astype(dtype), l2norm(k).astype(dtype)
    beta = beta.astype(jnp.float32)
    beta = jnp.where(jnp.abs(beta) < 2.0**-60, 2.0**-60, beta)
    return q, k, *(group(x, q.shape[1]) for x in (v, g, beta))
