"""The gated norm against its definition, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import GatedRMSNorm

from .mixers import difference


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


GATES = {"swish": lambda x: x * sigmoid(x), "sigmoid": sigmoid, None: lambda x: 1.0}


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("use_scale", [True, False])
def test_definition(activation, use_scale):
    rng = np.random.default_rng(0)
    x, gate, scale = rng.normal(size=(5, 3, 8)), rng.normal(size=(5, 3, 8)), rng.normal(size=8)
    norm = GatedRMSNorm(
        8, epsilon=0.1, use_scale=use_scale, activation=activation or "swish", rngs=nnx.Rngs(0)
    )
    if use_scale:
        norm.scale[...] = jnp.asarray(scale, jnp.float32)

    def flat(a):
        return jnp.asarray(a, jnp.float32).reshape(5, 24)

    y = norm(flat(x), flat(gate) if activation else None).reshape(5, 3, 8)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 0.1) * GATES[activation](gate)
    assert difference(y, expected * scale if use_scale else expected) < 1e-6


def test_bfloat16_is_computed_in_float32():
    norm = GatedRMSNorm(256, rngs=nnx.Rngs(0))
    x = jnp.full((1, 256), 3e4, jnp.bfloat16).at[0, 0].set(1)
    y = norm(x, jnp.ones((1, 256), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert np.allclose(np.asarray(y[0, 1:], np.float32), sigmoid(1) * np.sqrt(256 / 255), rtol=4e-3)


def test_zero_vector_has_finite_gradients():
    norm = GatedRMSNorm(8, rngs=nnx.Rngs(0))
    dx = jax.grad(lambda x: jnp.sum(norm(x, jnp.ones((1, 8)))))(jnp.zeros((1, 8)))
    assert np.allclose(dx, sigmoid(1) / np.sqrt(1e-5), rtol=1e-5)


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"activation must be one of .* got 'softmax'"):
        GatedRMSNorm(8, activation="softmax", rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("x", "gate", "message"),
    [
        (jnp.ones((1, 8), int), None, r"x must be an array of one of \(.*\), got int32"),
        (jnp.float32(1), None, r"x must hold whole heads of 8 .* got shape \(\)"),
        ([1.0] * 8, None, r"x must be an array of one of \(.*\), got list"),
        (jnp.ones((1, 8)), jnp.ones((1, 16)), r"gate must have x's shape \(1, 8\), got \(1, 16\)"),
        (jnp.ones((1, 8)), 1.0, r"gate must be an array of one of \(.*\), got float"),
    ],
)
def test_wrong_calls(x, gate, message):
    with pytest.raises(ValueError, match=message):
        GatedRMSNorm(8, rngs=nnx.Rngs(0))(x, gate)


def test_part_of_a_head():
    with pytest.raises(ValueError, match=r"x must hold whole heads of 8 .* got shape \(1, 20\)"):
        GatedRMSNorm(8, rngs=nnx.Rngs(0))(jnp.ones((1, 20)))
