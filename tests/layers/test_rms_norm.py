"""RMSNorm against its definition, in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import RMSNorm


def make(zero_centered, param_dtype="float32"):
    norm = RMSNorm(
        6, epsilon=1e-2, zero_centered=zero_centered, param_dtype=param_dtype, rngs=nnx.Rngs(0)
    )
    norm.scale[...] += jnp.linspace(-1, 1, 6, dtype=param_dtype)
    return norm


@pytest.mark.parametrize("zero_centered", [False, True])
def test_definition(zero_centered):
    norm, x = make(zero_centered), np.random.default_rng(0).normal(size=(2, 3, 6))
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-2)
    expected *= 1 + np.linspace(-1, 1, 6)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


def test_a_new_norm_scales_nothing():
    x = jnp.asarray([[3.0, 4.0]])
    for zero_centered, start in ((False, 1), (True, 0)):
        norm = RMSNorm(2, zero_centered=zero_centered, rngs=nnx.Rngs(0))
        assert np.all(norm.scale[...] == start)
        np.testing.assert_allclose(norm(x), x / np.sqrt(12.5), rtol=1e-6)


def test_bfloat16_computes_in_float32():
    norm, x = make(True, "bfloat16"), jnp.linspace(-1, 1, 6).astype(jnp.bfloat16)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    wide = make(True)
    wide.scale[...] = norm.scale[...].astype(jnp.float32)
    np.testing.assert_array_equal(y, wide(x.astype(jnp.float32)).astype(jnp.bfloat16))


@pytest.mark.parametrize("x", [jnp.ones((2, 5)), jnp.ones((2, 1)), jnp.ones(()), jnp.ones(6, int)])
def test_wrong_inputs(x):
    with pytest.raises(ValueError, match="x must be"):
        make(False)(x)
