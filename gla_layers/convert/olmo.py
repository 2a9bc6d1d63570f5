"""OLMo-Hybrid: Gated DeltaNet, and attention that norms q and k over all heads.

Attention and the MLP after it norm what they add to the residual stream. Published files and the
modules of transformers name some tensors differently.
"""

from collections.abc import Mapping
from typing import Any

from . import decoder
from .correspondence import convolution, linear, norm, vector
from .family import CheckpointConfig, Family, MixerFamily
from .fla import CONVOLVED, PROJECTIONS

GATES = (
    *(linear(f"{x}_proj") for x in "abg"),
    *(vector("A_log"), vector("dt_bias"), norm("o_norm")),
)
GATED_DELTANET = (*CONVOLVED, *GATES)
GATED_DELTANET_MODULE = (
    *PROJECTIONS,
    convolution("conv1d", "q_conv1d", "k_conv1d", "v_conv1d"),
    *GATES,
)
ATTENTION = (*PROJECTIONS, norm("q_norm"), norm("k_norm"))
PUBLISHED_NORMS = (
    norm("attention_layer_norm", "mixer_norm"),
    norm("feedforward_layer_norm", "mlp_norm"),
)
OUTPUT_NORMS = (
    norm("post_attention_layernorm", "mixer_norm"),
    norm("post_feedforward_layernorm", "mlp_norm"),
)
LAYER_TYPES = {"linear_attention": "gated_deltanet", "full_attention": "attention"}


def _layer_mixers(config: CheckpointConfig) -> list[str]:
    config.require(hidden_act=("silu",), attention_bias=(False,))
    return decoder.mixers(config["layer_types"], LAYER_TYPES)


def _fields(config: CheckpointConfig) -> dict[str, Any]:
    return {**decoder.fields(config), "post_norm_mixers": ("attention",)}


def _gated_deltanet(config: CheckpointConfig) -> dict[str, Any]:
    allow_neg_eigval = config.get("linear_allow_neg_eigval", True)
    return {
        **decoder.gated_deltanet(config),
        "allow_neg_eigval": allow_neg_eigval,
        "norm_eps": 1e-5,
    }


def _attention(config: CheckpointConfig) -> dict[str, Any]:
    rope = decoder.rope(config)
    return {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "rope_theta": rope["rope_theta"],
        "qk_norm": "all_heads",
        "norm_eps": config["rms_norm_eps"],
    }


FAMILIES: Mapping[str, Family] = {
    "olmo_hybrid": Family(
        layer_mixers=_layer_mixers,
        fields=_fields,
        outside=decoder.outside(),
        layer=decoder.layer(),
        blocks=tuple(
            (*norms, *decoder.MLP) for norms in (PUBLISHED_NORMS, OUTPUT_NORMS, decoder.NORMS)
        ),
        mixers={
            "gated_deltanet": MixerFamily(
                "linear_attn.", _gated_deltanet, (GATED_DELTANET, GATED_DELTANET_MODULE)
            ),
            "attention": MixerFamily("self_attn.", _attention, (ATTENTION,)),
        },
    )
}
"""By the `model_type` of their `config.json`."""
