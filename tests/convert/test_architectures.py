"""What a `config.json` says of a model, kind by kind; models that were not recorded; loading."""

import json
import pathlib
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors.numpy import load_file

from gla_layers import LanguageModel, LanguageModelConfig, ShardingConfig
from gla_layers.convert import load_pretrained, save_pretrained
from gla_layers.convert.family import CheckpointConfig
from gla_layers.convert.files import TensorFiles
from gla_layers.convert.pretrained import FAMILIES
from tests.layers.mixers import fill

from .folders import write

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKENS = np.arange(12).reshape(1, 12) % 7


def read_config(**config) -> LanguageModelConfig:
    return FAMILIES[config["model_type"]].read_config(CheckpointConfig(config))


def recorded_config(name: str, **changes) -> dict:
    return json.loads((DATA / name / "config.json").read_text()) | changes


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def make(config: LanguageModelConfig) -> LanguageModel:
    """A model with normal parameters."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return fill(model, lambda path, p: rng.normal(size=p.shape, scale=0.3))


@nnx.jit
def logits_of(model):
    return model(TOKENS)


HYBRIDS = {
    "gated_deltanet": (
        {"num_heads": 1, "num_v_heads": 2, "head_dim": 8, "norm_eps": 1e-5, "use_gate": False},
        {"num_heads": 2, "num_kv_heads": 1, "qkv_bias": True, "rope_theta": 100.0},
    ),
    "kda": (
        {"num_heads": 2, "head_dim": 8, "norm_eps": 1e-5, "safe_gate": True, "lower_bound": -5.0},
        {"num_heads": 4},
    ),
    "simple_gla": (
        {"num_heads": 2, "num_kv_heads": 1, "norm_eps": 1e-5, "use_short_conv": False},
        {"num_heads": 2},
    ),
}


@pytest.mark.parametrize("mixer", HYBRIDS)
def test_hybrids_of_flash_linear_attention(mixer, tmp_path):
    options, attention_options = HYBRIDS[mixer]
    config = LanguageModelConfig(
        vocab_size=7,
        hidden_size=16,
        num_layers=3,
        intermediate_size=8,
        mixers=(mixer, mixer, "attention"),
        mixer_options={mixer: options, "attention": attention_options},
        norm_eps=1e-5,
    )
    model = make(config)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.config.layer_mixers == config.layer_mixers
    np.testing.assert_array_equal(logits_of(again), logits_of(model))
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["attn"]["layers"] == [2]
    with TensorFiles(tmp_path) as files:
        bias = "model.layers.2.attn.q_proj.bias"
        assert (bias in files.names) == attention_options.get("qkv_bias", False)
        assert files.shape("model.layers.2.attn.k_proj.weight")[1] == 16


def test_a_norm_by_its_other_name(tmp_path):
    """As SimpleGLA's output norm is called where it is not fused with its gate."""
    config = LanguageModelConfig(
        vocab_size=7,
        hidden_size=16,
        num_layers=1,
        intermediate_size=8,
        mixers=("simple_gla",),
        mixer_options={"simple_gla": {"num_heads": 2, "norm_eps": 1e-5}},
        norm_eps=1e-5,
    )
    model = make(config)
    save_pretrained(model, tmp_path / "fused")
    tensors = load_file(tmp_path / "fused" / "model.safetensors")
    name = "model.layers.0.attn.g_norm_swish_gate.weight"
    tensors["model.layers.0.attn.g_norm.weight"] = tensors.pop(name)
    stored = json.loads((tmp_path / "fused" / "config.json").read_text())
    again = load_pretrained(write(tmp_path / "plain", stored, tensors))
    np.testing.assert_array_equal(logits_of(again), logits_of(model))


def test_width_of_flash_linear_attention():
    config = recorded_config("lm_gdn", intermediate_size=None, hidden_size=1024, hidden_ratio=4)
    assert read_config(**config).intermediate_size == 2816


def test_published_qwen3_next():
    config = without(recorded_config("hf_qwen3_next_lm"), "rope_parameters", "layer_types")
    config |= {"num_hidden_layers": 8, "mlp_only_layers": list(range(8)), "rope_theta": 1e7}
    config |= {"partial_rotary_factor": 0.5, "rope_scaling": None, "full_attention_interval": 4}
    model = read_config(**config)
    assert model.mixers == ("gated_deltanet",) * 3 + ("attention",)
    assert model.mixer_options["attention"]["rope_theta"] == 1e7
    assert model.mixer_options["attention"]["rotary_dim"] == 8


def test_published_kimi_linear():
    recorded = recorded_config("hf_kimi_linear_lm")
    config = without(recorded, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    config = without(config, "layer_types", "mlp_layer_types")
    config |= {"num_hidden_layers": 5, "first_k_dense_replace": 5, "mla_use_nope": True}
    config["linear_attn_config"] = {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3, 5],
        "num_heads": 2,
        "head_dim": 24,
        "short_conv_kernel_size": 3,
    }
    model = read_config(**config)
    assert model.layer_mixers == ("kda", "kda", "kda", "latent_attention", "kda")
    assert model.mixer_options["kda"]["conv_size"] == 3


def recorded_tensors(name: str) -> dict[str, np.ndarray]:
    return load_file(DATA / name / "model.safetensors")


def assert_same_model(folder: pathlib.Path, name: str, ignore: tuple[str, ...] = ()) -> None:
    """The recorded model, whose tensors have other names here, and keep them."""
    model = load_pretrained(folder, ignore=ignore)
    np.testing.assert_array_equal(logits_of(model), logits_of(load_pretrained(DATA / name)))
    again = folder.with_name("again")
    save_pretrained(model, again, like=folder, ignore=ignore)
    original = load_file(folder / "model.safetensors")
    kept = {name for name in original if not name.startswith(ignore)}
    assert load_file(again / "model.safetensors").keys() == kept


def test_qwen3_5_that_sees(tmp_path):
    """Its language model lies one level down."""
    text = without(recorded_config("hf_qwen3_5_lm"), "tie_word_embeddings")
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    tensors = {
        name.replace("model.", "model.language_model."): x
        for name, x in recorded_tensors("hf_qwen3_5_lm").items()
    }
    tensors["model.visual.patch_embed.proj.bias"] = np.zeros(4, np.float32)
    folder = write(tmp_path / "sees", config, tensors)
    with pytest.raises(ValueError, match=r"unused tensors: model\.visual\.patch_embed\.proj\.bias"):
        load_pretrained(folder)
    assert_same_model(folder, "hf_qwen3_5_lm", ignore=("model.visual.",))
    model = load_pretrained(folder, ignore=("model.visual.",))
    with pytest.raises(ValueError, match="differ in tensors: model"):
        save_pretrained(model, tmp_path / "written", like=folder)


def test_olmo_hybrid_as_its_modules_name_it(tmp_path):
    tensors, layer = recorded_tensors("hf_olmo_hybrid_lm"), "model.layers.0."
    convolutions = [tensors.pop(f"{layer}linear_attn.{x}_conv1d.weight") for x in "qkv"]
    tensors[f"{layer}linear_attn.conv1d.weight"] = np.concatenate(convolutions)
    for published, module in (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ):
        tensors[f"{layer}{module}.weight"] = tensors.pop(f"{layer}{published}.weight")
    folder = write(tmp_path / "module", recorded_config("hf_olmo_hybrid_lm"), tensors)
    assert_same_model(folder, "hf_olmo_hybrid_lm")


def test_olmo_hybrid_with_positions():
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = read_config(**recorded_config("hf_olmo_hybrid_lm", rope_parameters=rope))
    assert config.mixer_options["attention"]["rope_theta"] == 5e5


def test_kimi_linear_as_published(tmp_path):
    """Where a dense MLP is called one."""
    recorded = recorded_tensors("hf_kimi_linear_lm")
    tensors = {name.replace("block_sparse_moe", "mlp"): x for name, x in recorded.items()}
    folder = write(tmp_path / "published", recorded_config("hf_kimi_linear_lm"), tensors)
    assert_same_model(folder, "hf_kimi_linear_lm")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hf_qwen3_next_lm", {"mlp_only_layers": [0]}, "mixtures of experts .* layers [1] are"),
        ("hf_qwen3_next_lm", {"mlp_only_layers": None}, "mixtures of experts .* layers [0, 1] are"),
        (
            "hf_qwen3_next_lm",
            {"layer_types": ["mamba"] * 2},
            "layer_types ['mamba'], expected only",
        ),
        ("hf_qwen3_next_lm", {"attention_bias": True}, "attention_bias = True, expected False"),
        (
            "hf_qwen3_next_lm",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type = 'yarn', expected 'default'",
        ),
        ("hf_kimi_linear_lm", {"mlp_layer_types": ["dense", "sparse"]}, "layers [1] are"),
        ("hf_kimi_linear_lm", {"mlp_layer_types": None}, "layers [1] are"),
        ("hf_kimi_linear_lm", {"q_lora_rank": 8}, "q_lora_rank = 8, expected None"),
        ("hf_kimi_linear_lm", {"mla_use_nope": False}, "mla_use_nope = False, expected True"),
    ],
)
def test_what_no_model_here_has_is_named(name, changes, message):
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ValueError, match=pattern):
        read_config(**recorded_config(name, **changes))


def test_split_over_a_mesh():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    whole = load_pretrained(DATA / "hf_qwen3_next_lm")
    with jax.set_mesh(mesh):
        model = load_pretrained(DATA / "hf_qwen3_next_lm", sharding=ShardingConfig.fsdp_tensor())
    kernel = model.layers[0].mixer.q_proj.kernel
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)
    for part, expected in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(whole)), strict=True
    ):
        np.testing.assert_array_equal(part, expected)


def test_one_tensor_is_in_memory_at_a_time(monkeypatch):
    """Beside the model, which is of another type here, so that no array of it is the tensor's."""
    read, matrices = TensorFiles.read, []

    def watched(self, name):
        assert not any(matrix() is not None for matrix in matrices)
        tensor = read(self, name)
        if tensor.ndim > 1:
            matrices.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(TensorFiles, "read", watched)
    load_pretrained(DATA / "lm_gdn", param_dtype=jnp.bfloat16)
    assert len(matrices) == 28
