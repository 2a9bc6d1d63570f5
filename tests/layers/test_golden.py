"""The layers against flash-linear-attention's, run in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import GatedDeltaNet

from .golden import error, load
from .mixers import run

CASES = [
    "gdn_default",
    "gdn_gva",
    "gdn_leftpad",
    "gdn_neg",
    "gdn_sigmoid_convbias",
    "gdn_varlen",
    "kda_default",
    "kda_gva",
    "kda_neg_convbias",
    "kda_safe_gate",
    "kda_varlen",
    "sgla_default",
    "sgla_kv_groups",
    "sgla_varlen",
]
DECODED = [case for case in CASES if not case.endswith(("leftpad", "varlen"))]

IMPLEMENTED = [(case, "xla") for case in CASES] + [
    (case, "reference") for case in CASES if case.endswith(("default", "varlen"))
]

# Five to ten times what correct float32 gives.
FORWARD, GRADIENT = 1e-5, 1e-4


@jax.jit
def gradients_and_output(layer, x, dy, segment_ids):
    def loss(layer, x):
        y = layer(x, segment_ids=segment_ids)
        return jnp.sum(y * dy), y

    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


@pytest.mark.parametrize(("case", "implementation"), IMPLEMENTED)
def test_outputs_and_gradients(case, implementation):
    golden = load(case, implementation=implementation)
    arguments = golden.layer, golden["x"], golden["dy"], golden.segment_ids
    (dlayer, dx), y = gradients_and_output(*arguments)
    assert error(y, golden["y"]) < FORWARD
    assert error(dx, golden["dx"]) < GRADIENT
    gradients = {path: g[...] for path, g in nnx.to_flat_state(dlayer)}
    expected = golden.gradients()
    assert gradients.keys() == expected.keys()
    for path, g in gradients.items():
        assert error(g, expected[path]) < GRADIENT, path


@pytest.mark.parametrize("case", DECODED)
def test_decoding(case):
    golden = load(case)
    x = golden["x"]
    batch, length, _ = x.shape
    y, state = run(golden.layer, x[:, : length - 5], golden.layer.init_state(batch))
    outputs = [y]
    for t in range(length - 5, length):
        y, state = run(golden.layer, x[:, t : t + 1], state)
        outputs.append(y)
    assert error(jnp.concatenate(outputs, axis=1), golden["y_decode"]) < FORWARD
    recorded = np.swapaxes(golden["recurrent_state_v_first"], -1, -2)
    assert error(state.recurrent, recorded) < FORWARD
    for name, history in zip("qkv", state.convolution, strict=True):
        recorded = np.swapaxes(golden[f"conv_state/{name}"], -1, -2)[:, 1:]
        assert error(history, recorded) < FORWARD, name


@pytest.mark.parametrize("case", ["gdn_default", "kda_default", "sgla_default"])
def test_value_heads_in_blocks(case):
    # As value heads larger than the op's largest go through it.
    golden = load(case)
    golden.layer.heads = dataclasses.replace(golden.layer.heads, value_blocks=2)
    y, state = run(golden.layer, golden["x"], golden.layer.init_state(2))
    assert error(y, golden["y"]) < FORWARD
    blocks = np.split(np.swapaxes(golden["recurrent_state_v_first"], -1, -2), 2, axis=-1)
    assert error(state.recurrent, np.stack(blocks, axis=2).reshape(state.recurrent.shape)) < FORWARD


def test_default_sizes():
    # Six value heads of 512, each with two states, as in the paper's models.
    layer = nnx.eval_shape(lambda: GatedDeltaNet(rngs=nnx.Rngs(0)))
    assert jax.eval_shape(lambda: layer.init_state(1)).recurrent.shape == (1, 12, 256, 256)
    x = jax.ShapeDtypeStruct((1, 3, 2048), jnp.float32)
    assert jax.eval_shape(lambda layer, x: layer(x), layer, x).shape == x.shape
