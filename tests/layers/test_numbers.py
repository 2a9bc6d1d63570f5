"""Which numbers are computed in which type, and with which heads and precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import KDA, GatedDeltaNet

from .mixers import CLASSES, LINEAR, MIXERS, difference, empty_state, inputs, make

every_linear = pytest.mark.parametrize("name", LINEAR)


class OpCalled(Exception):
    """Stops a layer at its op, with the op's arguments."""


@pytest.fixture
def op_arguments(monkeypatch):
    """`op_arguments(layer, x)`: the tokens and the options that the layer calls its op with."""

    def stop(*tokens, **options):
        raise OpCalled(tokens, options)

    def arguments(layer, x, **call):
        monkeypatch.setattr(type(layer), "_chunk", staticmethod(stop))
        with pytest.raises(OpCalled) as called:
            layer(x, **call)
        return called.value.args

    return arguments


@every_linear
def test_gates_are_float32_under_bfloat16(name, op_arguments):
    layer = make(name, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    (q, k, v, *gates), _ = op_arguments(layer, inputs(1, 12, "bfloat16"))
    assert {x.dtype for x in (q, k, v)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in gates} == {jnp.dtype("float32")}
    for path, p in nnx.to_flat_state(nnx.state(layer)):
        wide = path[-1] in ("A_log", "dt_bias", "scale")
        assert p.dtype == (jnp.float32 if wide else jnp.bfloat16), path


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_beta_is_not_rounded_to_bfloat16(name, op_arguments):
    # sigmoid(0.5) = 0.62245935 is 0.62109375 in bfloat16, and 0.50390625 is not a bfloat16.
    layer = make(name, dtype=jnp.bfloat16)
    x = jnp.zeros((1, 12, layer.hidden_size), jnp.bfloat16).at[..., :2].set(1)
    layer.b_proj.kernel[...] = jnp.zeros_like(layer.b_proj.kernel[...]).at[0].set(0.5)
    layer.b_proj.kernel[1] = 0.00390625
    (*_, beta), _ = op_arguments(layer, x)
    assert np.allclose(beta, 1 / (1 + np.exp(-0.50390625)), rtol=1e-6)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_softplus_of_large_and_small_steps(name, op_arguments):
    layer = make(name)
    heads = layer.heads.output
    layer.A_log[...] = jnp.zeros((heads,))
    steps = jnp.asarray([100.0, -12.0]).repeat(layer.dt_bias.shape[0] // 2)
    layer.dt_bias[...] = steps
    (_, _, _, g, _), _ = op_arguments(layer, jnp.zeros((1, 12, layer.hidden_size)))
    g = np.asarray(g[0, 0], np.float64).reshape(heads, -1)
    assert np.allclose(g[0], -100, rtol=1e-6)
    assert np.allclose(g[1], -np.log1p(np.exp(-12.0)), rtol=1e-6)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_decay_is_of_the_value_head(name, op_arguments):
    # With two value heads to a key head, A_log, dt_bias and beta belong to the value head.
    layer, x = make(name), inputs(1, 12)
    (_, _, _, g, beta), _ = op_arguments(layer, x)
    layer.A_log[1] += 1.0
    (_, _, _, changed, same_beta), _ = op_arguments(layer, x)
    assert g.shape[2] == beta.shape[2] == 2
    assert np.array_equal(changed[:, :, 0], g[:, :, 0])
    assert np.allclose(changed[:, :, 1], g[:, :, 1] * np.e, rtol=1e-5)
    assert np.array_equal(same_beta, beta)


def test_kv_heads_of_simple_gla_are_shared_by_neighbours(op_arguments):
    layer = make("sgla", num_heads=4, num_kv_heads=2)
    (q, k, v, g), _ = op_arguments(layer, inputs(1, 12))
    assert q.shape[2] == k.shape[2] == v.shape[2] == g.shape[2] == 4
    for x in (k, v):
        assert np.array_equal(x[:, :, 0], x[:, :, 1])
        assert np.array_equal(x[:, :, 2], x[:, :, 3])
        assert not np.allclose(x[:, :, 1], x[:, :, 2])


@every_linear
def test_precision_is_the_callers(name, op_arguments):
    for precision in (None, jax.lax.Precision.HIGHEST):
        layer, x = make(name, precision=precision), inputs(1, 12)
        _, options = op_arguments(layer, x)
        assert options["precision"] == precision
        assert {m.precision for _, m in nnx.iter_modules(layer) if isinstance(m, nnx.Linear)} == {
            precision
        }


def test_precision_of_attention():
    layer, x = make("attention", precision=jax.lax.Precision.HIGHEST), inputs(1, 12)
    products = [
        equation
        for equation in jax.make_jaxpr(lambda x: layer(x))(x).eqns
        if equation.primitive.name == "dot_general"
    ]
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    assert len(products) == 6
    assert all(product.params["precision"] == highest for product in products)


@every_linear
def test_activation_without_convolution(name, op_arguments):
    layer, x = make(name, use_short_conv=False), inputs(1, 12)
    (q, *_), _ = op_arguments(layer, x)
    projected = layer.q_proj(x)
    expected = projected if name == "sgla" else jax.nn.silu(projected)
    assert np.array_equal(q.reshape(projected.shape), expected)


def test_feature_map(op_arguments):
    layer, x = make("sgla", feature_map="relu"), inputs(1, 12)
    (q, k, v, _), _ = op_arguments(layer, x)
    assert q.min() == k.min() == 0
    assert v.min() < 0


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(
    ("x_dtype", "dtype", "param_dtype", "expected"),
    [
        ("bfloat16", None, "float32", "float32"),
        ("float32", "bfloat16", "float32", "bfloat16"),
        ("float32", None, "bfloat16", "float32"),
        ("float16", None, "float16", "float16"),
    ],
)
def test_dtypes(name, x_dtype, dtype, param_dtype, expected):
    # A state keeps its types, so that it can be carried through a loop.
    layer = make(name, dtype=dtype, param_dtype=jnp.dtype(param_dtype))

    def call(x):
        return layer(x, state=empty_state(layer, 2))

    y, state = jax.eval_shape(call, jax.ShapeDtypeStruct((2, 12, layer.hidden_size), x_dtype))
    assert y.dtype == expected
    assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(
        lambda a: a.dtype, empty_state(layer, 2)
    )


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_is_near_float32(name):
    x = inputs(2, 12)
    call = jax.jit(lambda layer, x: layer(x))
    exact = call(make(name), x)
    assert difference(call(make(name, dtype=jnp.bfloat16), x), exact) < 3e-2


@pytest.mark.parametrize("name", MIXERS)
def test_one_token_has_finite_gradients(name):
    # The other tokens' queries and keys are zero vectors, as padding's are.
    layer, x = make(name), jnp.zeros((1, 2, 16)).at[:, 1].set(1)

    @jax.jit
    def gradients(layer, x):
        return nnx.grad(lambda layer, x: jnp.sum(layer(x) ** 2), argnums=(0, 1))(layer, x)

    assert all(np.all(np.isfinite(d)) for d in jax.tree.leaves(gradients(layer, x)))


@pytest.mark.parametrize(
    ("make_layer", "low"),
    [
        (lambda rngs: GatedDeltaNet(8, num_heads=512, head_dim=1, rngs=rngs), 0.0),
        (lambda rngs: KDA(8, num_heads=512, head_dim=1, rngs=rngs), 1.0),
    ],
    ids=["gdn", "kda"],
)
def test_initial_decay(make_layer, low):
    layer = nnx.jit(lambda: make_layer(nnx.Rngs(0)))()
    rate = np.exp(np.asarray(layer.A_log[...], np.float64))
    assert rate.min() > low
    assert rate.max() <= 16 * (1 + 1e-6)
    assert abs(rate.mean() - (low + 16) / 2) < 1
    step = np.log1p(np.exp(np.asarray(layer.dt_bias[...], np.float64)))
    assert step.min() > 1e-3 * (1 - 1e-3)
    assert step.max() < 1e-1 * (1 + 1e-3)
    assert abs(np.log(step).mean() - np.log(1e-2)) < 0.3


def test_safe_gate_starts_from_rate_one():
    layer = nnx.jit(lambda: CLASSES["kda"](safe_gate=True, lower_bound=-5.0, rngs=nnx.Rngs(0)))()
    assert np.all(np.asarray(layer.A_log[...]) == 0)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
@every_linear
def test_no_tokens(name, shape):
    assert make(name)(jnp.ones((*shape, 16))).shape == (*shape, 16)


@every_linear
def test_float32_inputs_under_x64(name):
    with jax.enable_x64(True):
        layer = CLASSES[name](rngs=nnx.Rngs(0))
        assert layer(jnp.ones((1, 3, 16), jnp.float32)).dtype == jnp.float32
