"""Whole models of other libraries: their outputs, and the same files written back.

Recorded from flash-linear-attention 0.6.0 in float64 (lm_*) and transformers 5.24.0 in float32
(hf_*), on a CPU.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gla_layers import LanguageModel
from gla_layers.convert import load_pretrained, save_pretrained
from gla_layers.convert.files import TensorFiles

from .folders import write

DATA = pathlib.Path(__file__).parents[1] / "data"
FLA = ["lm_gdn", "lm_kda"]
MODELS = [
    *FLA,
    "hf_qwen3_next_lm",
    "hf_qwen3_5_lm",
    "hf_olmo_hybrid_lm",
    "hf_kimi_linear_lm",
]

# Ten times what correct float32 gives.
TOLERANCE = 1e-4


@functools.cache
def load(name: str) -> LanguageModel:
    return load_pretrained(DATA / name)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(DATA / name / "golden.npz"))


@nnx.jit
def run(model, tokens, state=None):
    return model(tokens, state=state)


def error(actual, expected) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    with TensorFiles(folder) as files:
        return {name: files.read(name) for name in files.names}


def assert_same_tensors(folder: pathlib.Path, expected: pathlib.Path) -> None:
    """The same names, shapes, types and bits."""
    actual, wanted = tensors(folder), tensors(expected)
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert actual[name].dtype == tensor.dtype
        np.testing.assert_array_equal(actual[name], tensor, err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    assert error(run(load(name), golden(name)["input_ids"]), golden(name)["logits"]) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_loss(name):
    loss = nnx.jit(LanguageModel.loss)(load(name), golden(name)["input_ids"])
    assert error(loss, golden(name)["loss"]) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_decoding(name):
    model, ids = load(name), jnp.asarray(golden(name)["input_ids"])
    batch, length = ids.shape
    _, state = run(model, ids[:, :-5], model.init_state(batch, length))
    outputs = []
    for t in range(length - 5, length):
        logits, state = run(model, ids[:, t : t + 1], state)
        outputs.append(logits)
    assert error(jnp.concatenate(outputs, axis=1), golden(name)["logits_decode"]) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_written_like_the_original_it_is_the_original(name, tmp_path):
    save_pretrained(load(name), tmp_path, like=DATA / name)
    assert_same_tensors(tmp_path, DATA / name)
    assert load_pretrained(tmp_path).config == load(name).config


@pytest.mark.parametrize("name", FLA)
def test_flash_linear_attention_needs_no_original(name, tmp_path):
    save_pretrained(load(name), tmp_path)
    assert_same_tensors(tmp_path, DATA / name)
    assert load_pretrained(tmp_path).config == load(name).config


def test_several_files(tmp_path):
    save_pretrained(load("lm_gdn"), tmp_path, max_shard_size=100_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert_same_tensors(tmp_path, DATA / "lm_gdn")
    expected = run(load("lm_gdn"), golden("lm_gdn")["input_ids"])
    assert error(run(load_pretrained(tmp_path), golden("lm_gdn")["input_ids"]), expected) == 0


def test_bfloat16_parameters(tmp_path):
    narrow = load_pretrained(DATA / "lm_gdn", param_dtype=jnp.bfloat16)
    save_pretrained(narrow, tmp_path)
    stored = tensors(tmp_path)
    assert stored["lm_head.weight"].dtype == jnp.bfloat16
    assert stored["model.layers.0.attn.A_log"].dtype == np.float32
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_bfloat16_files_in_float32_parameters_and_back(tmp_path):
    config = json.loads((DATA / "lm_gdn" / "config.json").read_text())
    narrow = {name: x.astype(jnp.bfloat16) for name, x in tensors(DATA / "lm_gdn").items()}
    original = write(tmp_path / "original", config, narrow)
    model = load_pretrained(original)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    save_pretrained(model, tmp_path / "again", like=original)
    assert_same_tensors(tmp_path / "again", original)
