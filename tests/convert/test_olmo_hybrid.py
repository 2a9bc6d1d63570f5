"""OLMo-Hybrid, of which no model was recorded: its two namings, and what its config says."""

import jax
import numpy as np
from safetensors.numpy import load_file

from gla_layers.convert import load_pretrained, save_pretrained

from .folders import write

CONFIG = {
    "model_type": "olmo_hybrid",
    "vocab_size": 7,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
}


def published_tensors() -> dict[str, np.ndarray]:
    """Random ones, named as in published files."""
    mlp = {"gate_proj.weight": (8, 16), "up_proj.weight": (8, 16), "down_proj.weight": (16, 8)}
    linear_attn = {
        **{f"{x}_proj.weight": (16, 16) for x in "qk"},
        **{f"{x}_proj.weight": (32, 16) for x in "vg"},
        **{f"{x}_proj.weight": (2, 16) for x in "ab"},
        "q_conv1d.weight": (16, 1, 4),
        "k_conv1d.weight": (16, 1, 4),
        "v_conv1d.weight": (32, 1, 4),
        "o_proj.weight": (16, 32),
        "o_norm.weight": (16,),
        "A_log": (2,),
        "dt_bias": (2,),
    }
    self_attn = {
        "q_proj.weight": (16, 16),
        "k_proj.weight": (8, 16),
        "v_proj.weight": (8, 16),
        "o_proj.weight": (16, 16),
        "q_norm.weight": (16,),
        "k_norm.weight": (8,),
    }
    shapes = {
        "model.embed_tokens.weight": (7, 16),
        "lm_head.weight": (7, 16),
        "model.norm.weight": (16,),
        **{f"model.layers.{n}.mlp.{name}": shape for n in (0, 1) for name, shape in mlp.items()},
        **{f"model.layers.0.linear_attn.{name}": shape for name, shape in linear_attn.items()},
        **{f"model.layers.1.self_attn.{name}": shape for name, shape in self_attn.items()},
        "model.layers.0.attention_layer_norm.weight": (16,),
        "model.layers.0.feedforward_layer_norm.weight": (16,),
        "model.layers.1.post_attention_layernorm.weight": (16,),
        "model.layers.1.post_feedforward_layernorm.weight": (16,),
    }
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def by_module_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors as transformers' modules name them."""
    tensors, layer = dict(tensors), "model.layers.0."
    convolutions = [tensors.pop(f"{layer}linear_attn.{x}_conv1d.weight") for x in "qkv"]
    tensors[f"{layer}linear_attn.conv1d.weight"] = np.concatenate(convolutions)
    for published, module in (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ):
        tensors[f"{layer}{module}.weight"] = tensors.pop(f"{layer}{published}.weight")
    return tensors


def test_olmo_hybrid(tmp_path):
    tensors = published_tensors()
    model = load_pretrained(write(tmp_path / "published", CONFIG, tensors))
    attention = model.layers[1].mixer
    assert (attention.rope_theta, attention.qk_norm) == (None, "all_heads")
    assert model.layers[0].mixer.allow_neg_eigval
    assert [layer.post_norm for layer in model.layers] == [False, True]
    for name, parameter in {
        "model.layers.0.attention_layer_norm": model.layers[0].mixer_norm,
        "model.layers.0.feedforward_layer_norm": model.layers[0].mlp_norm,
        "model.layers.1.post_attention_layernorm": model.layers[1].mixer_norm,
        "model.layers.1.post_feedforward_layernorm": model.layers[1].mlp_norm,
        "model.layers.1.self_attn.k_norm": attention.k_norm,
    }.items():
        np.testing.assert_array_equal(parameter.scale[...], tensors[f"{name}.weight"])
    tokens = np.arange(6, dtype=np.int32)[None]
    module = by_module_names(tensors)
    same = load_pretrained(write(tmp_path / "module", CONFIG, module))
    np.testing.assert_array_equal(jax.jit(same)(tokens), jax.jit(model)(tokens))
    for original, expected in (("published", tensors), ("module", module)):
        save_pretrained(model, tmp_path / f"{original} again", like=tmp_path / original)
        written = load_file(tmp_path / f"{original} again" / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(np.array_equal(written[name], tensor) for name, tensor in expected.items())
