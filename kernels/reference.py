"""The recurrences, token by token: the definition that everything else is tested against.

Per value head, with the state S [K, V], and a = exp(g), or 1 where g > 0:

    SimpleGLA   S <- a S + k v^T                               a is one number
    GLA         S <- diag(a) S + k v^T                         a has one entry per key channel
    GDN         S <- a S;         S <- S + beta k (v - S^T k)^T      a is one number
    KDA         S <- diag(a) S;   S <- S + beta k (v - S^T k)^T      a has one entry per key channel
    all         o  = S^T (scale q)

Each document has a state of its own, which only its own tokens read and change: that is all
there is to packing. Computed in float32, or in float64 for float64 inputs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .packing import Packing, zero_padding

HIGHEST = jax.lax.Precision.HIGHEST


def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    states: Float[Array, "B N HV K V"],
    packing: Packing,
    *,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B N HV K V"]]:
    """Gated delta rule from one state per document; returns the outputs and the new states."""
    channel_decay = jnp.broadcast_to(g[..., None], (*g.shape, k.shape[-1]))
    return kda(q, k, v, channel_decay, beta, states, packing, scale=scale, qk_l2norm=qk_l2norm)


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    states: Float[Array, "B N HV K V"],
    packing: Packing,
    *,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B N HV K V"]]:
    """Delta rule with a decay per key channel, from one state per document."""

    def delta_rule(state, k, v, beta):
        predicted = jnp.einsum("hkv,hk->hv", state, k, precision=HIGHEST)
        return beta[:, None] * (v - predicted)

    return _recurrence(delta_rule, q, k, v, g, beta, states, packing, scale, qk_l2norm)


def simple_gla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    states: Float[Array, "B N HV K V"],
    packing: Packing,
    *,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B N HV K V"]]:
    """Gated linear attention with one decay per head, from one state per document."""
    channel_decay = jnp.broadcast_to(g[..., None], (*g.shape, k.shape[-1]))
    return gla(q, k, v, channel_decay, states, packing, scale=scale, qk_l2norm=qk_l2norm)


def gla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    states: Float[Array, "B N HV K V"],
    packing: Packing,
    *,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B N HV K V"]]:
    """Gated linear attention with a decay per key channel, from one state per document."""

    def plain_write(state, k, v, beta):
        return v

    beta = jnp.ones(g.shape[:3], g.dtype)
    return _recurrence(plain_write, q, k, v, g, beta, states, packing, scale, qk_l2norm)


def l2norm(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """`x * rsqrt(sum(x**2) + 1e-6)` over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _recurrence(written_value, q, k, v, g, beta, states, packing, scale, qk_l2norm):
    output_dtype = v.dtype
    compute_dtype = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    q, k, v, g, beta = (zero_padding(x, packing).astype(compute_dtype) for x in (q, k, v, g, beta))
    states = states.astype(compute_dtype)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))
    decay = jnp.exp(jnp.where(g > 0, 0, g))

    def token(states, inputs):
        q, k, v, decay, beta, document, valid = inputs
        before = states[document]
        decayed = decay[..., None] * before
        after = decayed + k[..., None] * written_value(decayed, k, v, beta)[:, None, :]
        after = jnp.where(valid, after, before)
        o = jnp.einsum("hkv,hk->hv", after, scale * q, precision=HIGHEST)
        return states.at[document].set(after), jnp.where(valid, o, 0)

    def row(states, *inputs):
        return jax.lax.scan(token, states, inputs)

    states, o = jax.vmap(row)(states, q, k, v, decay, beta, packing.document, packing.valid)
    return o.astype(output_dtype), states
