"""The optimizer: what decays, what is averaged, and dtypes that stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optimizer import make_optimizer

from gla_layers import KDA


def optimizer_of(model, **changes):
    options = {
        "learning_rate": 1e-2,
        "warmup_steps": 0,
        "steps": 10,
        "weight_decay": 0.0,
        "clip_norm": 1e9,
        "accumulate": 1,
    }
    return nnx.Optimizer(model, make_optimizer(**options | changes), wrt=nnx.Param)


@nnx.jit
def update(optimizer, model, gradient):
    """Update with a gradient that is the same number everywhere."""
    gradients = jax.tree.map(lambda x: jnp.full_like(x, gradient), nnx.state(model, nnx.Param))
    optimizer.update(model, gradients)


def make_layer(param_dtype=jnp.float32):
    return KDA(16, num_heads=1, head_dim=8, param_dtype=param_dtype, rngs=nnx.Rngs(0))


def named(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def test_only_matrices_decay():
    layer = make_layer()
    before = named(layer)
    update(optimizer_of(layer, weight_decay=0.5), layer, 0.0)
    changed = {name for name, x in named(layer).items() if not np.array_equal(x, before[name])}
    assert changed == {name for name in before if name.endswith("kernel")}
    assert {"A_log", "dt_bias", "o_norm.scale"} <= before.keys() - changed


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_do_not_drift(param_dtype, accumulate):
    layer = make_layer(param_dtype)
    optimizer = optimizer_of(layer, accumulate=accumulate, weight_decay=0.1, clip_norm=1.0)

    def dtypes():
        return jax.tree.map(lambda x: x.dtype, (nnx.state(layer), nnx.state(optimizer)))

    before = dtypes()
    for _ in range(4):
        update(optimizer, layer, 0.1)
    assert dtypes() == before
    assert layer.A_log.dtype == jnp.float32


def test_accumulated_batches_are_averaged():
    twice, once = make_layer(), make_layer()
    accumulating, plain = optimizer_of(twice, accumulate=2), optimizer_of(once)
    update(accumulating, twice, 1.0)
    assert all(np.array_equal(x, named(once)[name]) for name, x in named(twice).items())
    update(accumulating, twice, 3.0)
    update(plain, once, 2.0)
    for name, x in named(twice).items():
        np.testing.assert_allclose(x, named(once)[name], rtol=1e-6)


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    layer = make_layer()
    optimizer = optimizer_of(layer, warmup_steps=2)
    sizes = []
    for _ in range(12):
        before = named(layer)["A_log"]
        update(optimizer, layer, 1.0)
        # With a constant gradient Adam's step is the learning rate.
        sizes.append(float(np.abs(named(layer)["A_log"] - before).max()))
    np.testing.assert_allclose(sizes[:3], [0, 5e-3, 1e-2], atol=1e-5)
    np.testing.assert_allclose(sizes[10:], [1e-3, 1e-3], rtol=1e-3)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_batch_without_numbers_is_skipped(bad, accumulate):
    layer, without = make_layer(), make_layer()
    optimizer, expected = (optimizer_of(x, accumulate=accumulate) for x in (layer, without))
    for gradient in (1.0, bad, 2.0, bad, bad, 3.0, 4.0):
        update(optimizer, layer, gradient)
    for gradient in (1.0, 2.0, 3.0, 4.0):
        update(expected, without, gradient)
    assert all(np.array_equal(x, named(without)[name]) for name, x in named(layer).items())
