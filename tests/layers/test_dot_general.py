"""Products of single rows."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tpu_compiler import compile_for
from gla_layers.dot_general import dot_general


def product(x, kernel):
    numbers = ((x.ndim - 1,), (0,)), ((), ())
    return dot_general(x, kernel, numbers, precision="highest")


def arrays(*shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=shape).astype("float32"), rng.normal(size=(8, 5)).astype("float32")


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8), (1, 3, 8), (2, 1, 8), (1, 0, 8)])
def test_is_a_matrix_product(shape):
    x, kernel = arrays(*shape)
    np.testing.assert_allclose(product(x, kernel), x @ kernel, atol=1e-5)


def test_transforms_of_a_single_row():
    x, kernel = arrays(3, 1, 8)
    np.testing.assert_allclose(
        jax.vmap(product, in_axes=(0, None))(x, kernel), x @ kernel, atol=1e-5
    )
    dx, dkernel = jax.jit(jax.grad(lambda *a: jnp.sum(product(*a)), argnums=(0, 1)))(x[0], kernel)
    np.testing.assert_allclose(dx, kernel.sum(1)[None], atol=1e-5)
    np.testing.assert_allclose(dkernel, np.repeat(x[0].T, 5, axis=1), atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux alone")
@pytest.mark.parametrize("rows", [1, 2])
def test_goes_through_the_matrix_unit(rows):
    x = jax.ShapeDtypeStruct((1, rows, 2048), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16)
    # What a TPU's compiler makes of a product for the matrix unit.
    assert " convolution(" in compile_for("v6e", product, x, kernel).as_text()
