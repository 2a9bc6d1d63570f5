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
}


def rotate(x, position, theta):
    """Rotate channel pairs (i, i + D / 2) as complex numbers."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * position * theta ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def definition(layer, x, ids):
    """Query by query, in numpy."""
    x = np.asarray(x, np.float64)
    heads, size = layer.num_heads, layer.head_dim

    def project(name):
        return (x @ np.asarray(getattr(layer, name).kernel[...], np.float64)).reshape(
            *x.shape[:2], -1, size
        )

    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    o = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        if ids[b, t] == 0:
            continue
        kv = h // (heads // k.shape[2])
        keys = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
        query, key = q[b, t, h], k[b, keys, kv]
        if layer.rope_theta is not None:
            query = rotate(query, t, layer.rope_theta)
            key = np.stack([rotate(k[b, s, kv], s, layer.rope_theta) for s in keys])
        weights = np.exp(key @ query / np.sqrt(size))
        o[b, t, h] = weights @ v[b, keys, kv] / weights.sum()
    o = o.reshape(*x.shape[:2], -1)
    if layer.g_proj is not None:
        o = o / (1 + np.exp(-project("g_proj").reshape(o.shape)))
    return o @ np.asarray(layer.o_proj.kernel[...], np.float64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_definition(options):
    layer, x = make("attention", **options), inputs(2, 12)
    ids = np.asarray([[1] * 5 + [2] * 6 + [0], [0] * 3 + [4] * 9])
    y = run(layer, x, None, jnp.asarray(ids))
    assert difference(y, definition(layer, x, ids)) < 1e-5


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
