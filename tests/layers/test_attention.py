"""Softmax attention against its definition, in float64, and its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .mixers import HIDDEN, difference, inputs, make, run

OPTIONS = {
    "rope": {},
    "no-position": {"rope_theta": None},
    "gated": {"use_gate": True, "rope_theta": 100.0},
    "heads-as-many": {"num_kv_heads": 2, "head_dim": 6},
    "partial-rope": {"rotary_dim": 4},
    "biases": {"qkv_bias": True},
    "norms": {"qk_norm": "per_head", "norm_eps": 1e-2},
    "norms-over-heads": {"qk_norm": "all_heads"},
    "zero-centered-norms": {"qk_norm": "per_head", "zero_centered_norms": True},
}


def rotate(x, position, layer):
    """Rotate channel pairs (i, i + D / 2) of the first D as complex numbers."""
    half = layer.rotary_dim // 2
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(
        1j * position * layer.rope_theta ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def normed(x, norm):
    scale = np.asarray(norm.scale[...], np.float64) + norm.zero_centered
    return scale * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + norm.epsilon)


def softmax_attention(q, k, v, ids):
    """Query by query: each sees its document's tokens up to its own."""
    o = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, h in np.ndindex(q.shape[:3]):
        if ids[b, t] == 0:
            continue
        kv = h // (q.shape[2] // k.shape[2])
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
        weights = np.exp(k[b, seen, kv] @ q[b, t, h] / np.sqrt(q.shape[-1]))
        o[b, t, h] = weights @ v[b, seen, kv] / weights.sum()
    return o.reshape(*o.shape[:2], -1)


def positions(ids):
    """How many tokens of its document come before each token."""
    return np.stack([[np.sum(row[:t] == row[t]) for t in range(len(row))] for row in ids])


def definition(layer, x, ids):
    """In numpy."""
    x = np.asarray(x, np.float64)

    def project(linear):
        y = x @ np.asarray(linear.kernel[...], np.float64)
        return y if linear.bias is None else y + np.asarray(linear.bias[...], np.float64)

    q, k, v = (project(linear) for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.qk_norm == "all_heads":
        q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
    q, k, v = (y.reshape(*x.shape[:2], -1, layer.head_dim) for y in (q, k, v))
    if layer.qk_norm == "per_head":
        q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
    if layer.rope_theta is not None:
        position = positions(ids)[..., None, None]
        q, k = rotate(q, position, layer), rotate(k, position, layer)
    o = softmax_attention(q, k, v, ids)
    if layer.g_proj is not None:
        o = o / (1 + np.exp(-project(layer.g_proj)))
    return o @ np.asarray(layer.o_proj.kernel[...], np.float64)


def latent_definition(layer, x, ids):
    """In numpy, for the layer of mixers.py: 2 heads, keys of 8 + 4, values of 8, latents of 6."""
    x = np.asarray(x, np.float64)
    weights = {
        name: np.asarray(getattr(layer, name).kernel[...], np.float64)
        for name in ("q_proj", "kv_a_proj", "kv_b_proj", "o_proj")
    }
    q = (x @ weights["q_proj"]).reshape(*x.shape[:2], 2, 12)
    compressed = x @ weights["kv_a_proj"]
    latent = normed(compressed[..., :6], layer.kv_a_norm)
    expanded = (latent @ weights["kv_b_proj"]).reshape(*x.shape[:2], 2, 16)
    shared = np.stack([compressed[..., 6:]] * 2, axis=2)
    k = np.concatenate([expanded[..., :8], shared], axis=-1)
    return softmax_attention(q, k, expanded[..., 8:], ids) @ weights["o_proj"]


IDS = np.asarray([[1] * 5 + [2] * 6 + [0], [0] * 3 + [4] * 9])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_definition(options):
    layer, x = make("attention", **options), inputs(2, 12)
    y = run(layer, x, None, jnp.asarray(IDS))
    assert difference(y, definition(layer, x, IDS)) < 1e-5


def test_latent_definition():
    layer, x = make("latent"), inputs(2, 12)
    y = run(layer, x, None, jnp.asarray(IDS))
    assert difference(y, latent_definition(layer, x, IDS)) < 1e-5


def test_decoding_token_by_token():
    layer, x = make("attention", use_gate=True), inputs(2, 12)
    expected = definition(layer, x, np.ones((2, 12)))
    state = layer.init_state(2, 12)
    for t in range(12):
        y, state = run(layer, x[:, t : t + 1], state)
        assert difference(y, expected[:, t : t + 1]) < 1e-5
    assert np.array_equal(state.length, [12, 12])


def test_a_full_cache_gives_nan():
    layer, x = make("attention"), inputs(2, 12)
    ids = jnp.asarray([[1] * 6 + [0] * 6, [1] * 12])
    _, state = run(layer, x, layer.init_state(2, 12), ids)
    y, state = run(layer, x[:, :1], state)
    assert np.all(np.isfinite(y[0]))
    assert np.all(np.isnan(y[1]))
    assert np.array_equal(state.length, [7, 13])


def test_large_logits_in_float32():
    layer = make("attention", dtype=jnp.bfloat16, rope_theta=None)
    x = 100 * inputs(1, 12)
    y = run(layer, x)
    assert y.dtype == jnp.bfloat16
    assert np.all(np.isfinite(np.asarray(y, np.float32)))
    gradient = jax.grad(lambda x: jnp.sum(layer(x).astype(jnp.float32)))(x)
    assert gradient.shape == (1, 12, HIDDEN)
    assert np.all(np.isfinite(gradient))
