"""Layers of transformers' models: outputs, gradients, decoding, and their tensors given back."""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import KDA
from gla_layers.convert import layer_from_tensors, layer_to_tensors
from tests.layers.golden import error
from tests.layers.mixers import run

DATA = pathlib.Path(__file__).parents[1] / "data"
MIXERS = {
    "hf_qwen3_next_layer": "gated_deltanet",
    "hf_qwen3_5_layer": "gated_deltanet",
    "hf_olmo_hybrid_layer": "gated_deltanet",
    "hf_kimi_linear_layer": "kda",
    "gdn_default": "gated_deltanet",
    "kda_default": "kda",
    "sgla_default": "simple_gla",
}
TRANSFORMERS = [name for name in MIXERS if name.startswith("hf_")]

# Five to ten times what correct float32 gives.
FORWARD, GRADIENT = 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded layer: what its `config.json` says, and arrays by name."""

    mixer: str
    config: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @functools.cached_property
    def layer(self) -> nnx.Module:
        return layer_from_tensors(self.group("param/"), self.config, self.mixer)

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays whose names begin so, by the rest of their names."""
        names = [name for name in self.arrays if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.arrays[name] for name in names}


@functools.cache
def load(name: str) -> Recorded:
    arrays = dict(np.load(DATA / f"{name}.npz"))
    config = {"model_type": MIXERS[name]} | json.loads(str(arrays.pop("config")))
    return Recorded(MIXERS[name], config, arrays)


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert error(actual[name], tensor) < GRADIENT, name


@pytest.mark.parametrize("name", MIXERS)
def test_tensors_given_back_are_the_same(name):
    recorded = load(name)
    tensors = recorded.group("param/")
    back = layer_to_tensors(recorded.layer, recorded.config, like=tensors)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor, err_msg=key)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_outputs_and_gradients(name):
    recorded = load(name)
    x, dy = (jnp.asarray(recorded.arrays[key]) for key in ("x", "dy"))

    @jax.jit
    def both(layer, x):
        y, vjp = jax.vjp(lambda layer, x: layer(x), layer, x)
        return y, *vjp(dy)

    y, dlayer, dx = both(recorded.layer, x)
    assert error(y, recorded.arrays["y"]) < FORWARD
    assert error(dx, recorded.arrays["dx"]) < GRADIENT
    expected = recorded.group("grad/")
    assert_close(layer_to_tensors(dlayer, recorded.config, like=expected), expected)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_decoding(name):
    recorded = load(name)
    x = jnp.asarray(recorded.arrays["x"])
    batch, length, _ = x.shape
    y, state = run(recorded.layer, x[:, : length - 5], recorded.layer.init_state(batch))
    outputs = [y]
    for t in range(length - 5, length):
        y, state = run(recorded.layer, x[:, t : t + 1], state)
        outputs.append(y)
    assert error(jnp.concatenate(outputs, axis=1), recorded.arrays["y_decode"]) < FORWARD
    assert error(state.recurrent, recorded.arrays["recurrent_state_k_first"]) < FORWARD
    histories = np.swapaxes(np.concatenate(state.convolution, axis=-1), 1, 2)
    assert error(histories, recorded.arrays["conv_state"][..., 1:]) < FORWARD


def test_missing_unused_and_misshapen_tensors_are_named():
    recorded = load("hf_qwen3_next_layer")
    tensors = recorded.group("param/")
    tensors["extra.weight"] = tensors.pop("in_proj_ba.weight")
    tensors["A_log"] = np.zeros(5, np.float32)
    tensors["dt_bias"] = tensors["dt_bias"].astype(np.int32)
    with pytest.raises(ValueError, match="does not fit") as raised:
        layer_from_tensors(tensors, recorded.config, "gated_deltanet")
    for line in (
        "missing tensors: in_proj_ba.weight",
        "unused tensors: extra.weight",
        "tensors of the wrong shape: A_log [5], expected [4]",
        "tensors of a type other than float64, float32, float16, bfloat16: dt_bias int32",
    ):
        assert line in str(raised.value)


def test_a_mixer_that_the_checkpoint_has_not():
    config = load("hf_qwen3_next_layer").config
    message = "mixer must be one of qwen3_next's, ['attention', 'gated_deltanet'], got 'kda'"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer_from_tensors({}, config, "kda")


def test_a_layer_that_the_checkpoint_has_no_place_for():
    recorded = load("kda_default")
    layer = KDA(24, num_heads=2, head_dim=32, conv_bias=True, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"no place for parameters: k_conv1d\.bias, q_conv1d\.bias"
    ):
        layer_to_tensors(layer, recorded.config)
    with pytest.raises(ValueError, match=r"mixer must be one of kda's, .* got None"):
        layer_to_tensors(layer.q_proj, recorded.config)
