"""The short convolution against its definition, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import ShortConvolution

from .mixers import difference, fill

FEATURES = 6
IDENTITY = {"activation": "identity"}


def make(**options):
    layer = nnx.eval_shape(lambda: ShortConvolution(FEATURES, **options, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    return fill(layer, lambda path, p: rng.normal(size=p.shape))


def inputs(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=(*shape, FEATURES)), jnp.float32)


def definition(layer, x, history=None, ids=None, activate=True):
    """Token by token, in numpy."""
    kernel = np.asarray(layer.kernel[...], np.float64)
    width = kernel.shape[0]
    bias = 0 if layer.bias is None else np.asarray(layer.bias[...], np.float64)
    y = np.zeros(x.shape, np.float64)
    for b, row in enumerate(np.asarray(x, np.float64)):
        seen = [np.zeros(FEATURES)] * (width - 1) if history is None else list(history[b])
        previous = None
        for t, token in enumerate(row):
            document = 1 if ids is None else ids[b, t]
            if document != 0:
                if previous is not None and document != previous:
                    seen = [np.zeros(FEATURES)] * (width - 1)
                seen.append(token)
                out = bias + sum(kernel[j] * seen[len(seen) - width + j] for j in range(width))
                y[b, t] = out / (1 + np.exp(-out)) if activate else out
                previous = document
            elif previous is not None:
                previous = 0
    return y


@jax.jit
def run(layer, x, state=None, ids=None):
    return layer(x, state=state, segment_ids=ids)


@pytest.mark.parametrize("options", [{}, {"use_bias": True, "kernel_size": 3}, {"kernel_size": 1}])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_definition(options, length):
    # One and two tokens are less than the window.
    layer, x = make(**options), inputs(2, length)
    assert difference(run(layer, x), definition(layer, x)) < 1e-6


def test_from_a_history():
    layer, x, history = make(), inputs(2, 9), 1 + inputs(2, 3)
    y, state = run(layer, x, history)
    assert difference(y, definition(layer, x, history)) < 1e-6
    assert np.array_equal(state, x[:, 6:])
    y, state = run(layer, x[:, :2], history)
    assert difference(y, definition(layer, x[:, :2], history)) < 1e-6
    assert np.array_equal(state, jnp.concatenate([history[:, 2:], x[:, :2]], axis=1))


IDS = np.asarray(
    [[0, 0, 1, 1, 2, 5, 5, 5, 0], [1, 0, 1, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0]]
)


@pytest.mark.parametrize("has_history", [False, True])
def test_documents_and_padding(has_history):
    layer, x = make(), inputs(3, 9)
    history = 1 + inputs(3, 3) if has_history else None
    padded = jnp.where((IDS != 0)[..., None], x, jnp.nan)
    y = run(layer, padded, history, jnp.asarray(IDS))
    if has_history:
        y, state = y
        expected = [x[0, 5:8], np.concatenate([np.zeros((1, FEATURES)), x[1, 7:]]), history[2]]
        assert np.array_equal(state, np.stack(expected))
    valid = IDS != 0
    expected = definition(layer, x, history, IDS)
    assert difference(np.asarray(y)[valid], expected[valid]) < 1e-6


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed):
    # The outputs are bilinear in the inputs and the kernel, so differences are exact in float64.
    layer, x, history = make(**IDENTITY, use_bias=True), inputs(2, 7), 1 + inputs(2, 3)
    ids = jnp.asarray(IDS[:2, 2:]) if packed else None
    valid = np.ones((2, 7), bool) if ids is None else np.asarray(ids) != 0
    dy = jnp.where(valid[..., None], inputs(2, 7) + 1, 0)
    dstate = inputs(2, 3) - 1

    @jax.jit
    def gradients(layer, x, history):
        def loss(layer, x, history):
            y, state = layer(x, state=history, segment_ids=ids)
            return jnp.sum(y * dy) + jnp.sum(state * dstate)

        return nnx.grad(loss, argnums=(0, 1, 2))(layer, x, history)

    dlayer, dx, dhistory = gradients(layer, x, history)

    def derivative(x_step, history_step, kernel_step, bias_step):
        def loss(sign):
            moved = nnx.clone(layer)
            moved.kernel[...] += sign * kernel_step
            moved.bias[...] += sign * bias_step
            at_x, at_history = x + sign * x_step, history + sign * history_step
            y = definition(moved, at_x, at_history, ids, activate=False)
            _, state = run(moved, at_x, at_history, ids)
            return np.sum(y * dy) + np.sum(np.asarray(state) * dstate)

        return (loss(1) - loss(-1)) / 2

    rng = np.random.default_rng(2)
    for chosen in range(4):
        steps = [
            jnp.asarray(rng.normal(size=d.shape) if i == chosen else np.zeros(d.shape), jnp.float32)
            for i, d in enumerate((dx, dhistory, dlayer.kernel[...], dlayer.bias[...]))
        ]
        along = sum(
            np.sum(np.asarray(step, np.float64) * np.asarray(d))
            for step, d in zip(
                steps, (dx, dhistory, dlayer.kernel[...], dlayer.bias[...]), strict=True
            )
        )
        assert abs(derivative(*steps) - along) < 1e-4 * max(abs(along), 1), chosen


def test_activation_gradient():
    layer, x = make(), inputs(1, 5)

    @jax.jit
    def both(layer, x):
        def plain(x):
            before = sum(
                layer.kernel[...][j] * jnp.pad(x, ((0, 0), (3 - j, 0), (0, 0)))[:, :5]
                for j in range(4)
            )
            return jnp.sum(jax.nn.silu(before) ** 2)

        return jax.grad(lambda x: jnp.sum(layer(x) ** 2))(x), jax.grad(plain)(x)

    ours, autodiff = both(layer, x)
    assert difference(ours, autodiff) < 1e-5


def test_bfloat16_is_computed_in_float32():
    layer, x = make(dtype=jnp.bfloat16), inputs(2, 9).astype(jnp.bfloat16)
    y, state = run(layer, x, layer.init_state(2))
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    exact = definition(layer, x)
    # Half a unit in the last of bfloat16's eight bits, for the one rounding of the output.
    assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= 2**-8 * np.abs(exact) + 1e-6)


def test_initial_kernel_is_within_the_window_bound():
    kernel = ShortConvolution(512, kernel_size=4, rngs=nnx.Rngs(0)).kernel[...]
    assert 0.49 < float(jnp.max(jnp.abs(kernel))) <= 0.5
