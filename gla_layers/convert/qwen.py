"""Qwen3-Next and Qwen3.5: Gated DeltaNet, and attention with a gate, q and k norms, partial rotary.

Norms outside of the linear layers multiply by 1 + weight. A Qwen3.5 that also sees has its language
model's config and tensors one level down, beside those of its vision tower.
"""

from collections.abc import Mapping
from typing import Any

from . import decoder
from .correspondence import convolution, linear, norm, vector
from .family import CheckpointConfig, Family, MixerFamily, Rules

GATED_DELTANET = (
    convolution("conv1d", "q_conv1d", "k_conv1d", "v_conv1d"),
    *(vector("A_log"), vector("dt_bias"), norm("norm", "o_norm"), linear("out_proj", "o_proj")),
)
QWEN3_NEXT = (
    linear("in_proj_qkvz", "q_proj", "k_proj", "v_proj", "g_proj", per_head=True),
    linear("in_proj_ba", "b_proj", "a_proj", per_head=True),
    *GATED_DELTANET,
)
QWEN3_5 = (
    linear("in_proj_qkv", "q_proj", "k_proj", "v_proj"),
    *(linear("in_proj_z", "g_proj"), linear("in_proj_b", "b_proj"), linear("in_proj_a", "a_proj")),
    *GATED_DELTANET,
)
ATTENTION = (
    linear("q_proj", "q_proj", "g_proj", per_head=True),
    *(linear("k_proj"), linear("v_proj"), linear("o_proj"), norm("q_norm"), norm("k_norm")),
)
LAYER_TYPES = {"linear_attention": "gated_deltanet", "full_attention": "attention"}


def _layer_mixers(config: CheckpointConfig) -> list[str]:
    config.require(hidden_act=("silu",), attention_bias=(False,), attn_output_gate=(True,))
    decoder.check_dense(_expert_layers(config))
    numbers = range(config["num_hidden_layers"])
    period = config.get("full_attention_interval", 4)
    usual = ["linear_attention" if (n + 1) % period else "full_attention" for n in numbers]
    return decoder.mixers(config.get("layer_types") or usual, LAYER_TYPES)


def _expert_layers(config: CheckpointConfig) -> list[int]:
    if not config.get("num_experts"):
        return []
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    numbers = range(config["num_hidden_layers"])
    return [n for n in numbers if n not in dense and (n + 1) % step == 0]


def _attention(config: CheckpointConfig) -> dict[str, Any]:
    rope = decoder.rope(config)
    return {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "rope_theta": rope["rope_theta"],
        "rotary_dim": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "use_gate": True,
        "qk_norm": "per_head",
        "norm_eps": config["rms_norm_eps"],
        "zero_centered_norms": True,
    }


def _family(linear_attention: Rules, model: str = decoder.MODEL, part: str | None = None) -> Family:
    """A kind whose tensors' names begin with `model`, and whose config is that of a part."""

    def text(config: CheckpointConfig) -> CheckpointConfig:
        if part is None:
            return config
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        return CheckpointConfig(tied | config[part])

    return Family(
        layer_mixers=lambda config: _layer_mixers(text(config)),
        fields=lambda config: {**decoder.fields(text(config)), "zero_centered_norms": True},
        outside=decoder.outside(model),
        layer=decoder.layer(model),
        blocks=((*decoder.NORMS, *decoder.MLP),),
        mixers={
            "gated_deltanet": MixerFamily(
                "linear_attn.",
                lambda config: decoder.gated_deltanet(text(config)),
                (linear_attention,),
            ),
            "attention": MixerFamily(
                "self_attn.", lambda config: _attention(text(config)), (ATTENTION,)
            ),
        },
    )


FAMILIES: Mapping[str, Family] = {
    "qwen3_next": _family(QWEN3_NEXT),
    "qwen3_5_text": _family(QWEN3_5),
    "qwen3_5": _family(QWEN3_5, "model.language_model.", "text_config"),
}
"""By the `model_type` of their `config.json`."""
