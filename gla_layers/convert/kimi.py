"""Kimi Linear: KDA, and latent attention without positions.

Published files, the files that transformers writes, and its modules name some tensors differently.
"""

from collections.abc import Mapping
from typing import Any

from . import decoder
from .correspondence import PER_HEAD_4D, convolution, linear, norm, vector
from .family import CheckpointConfig, Family, MixerFamily
from .fla import CONVOLVED, PROJECTIONS

OUTPUT = (
    *(linear("g_a_proj", "g_proj.down"), linear("g_b_proj", "g_proj.up"), linear("b_proj")),
    norm("o_norm"),
)
KDA = (
    *CONVOLVED,
    *OUTPUT,
    *(linear("f_a_proj", "f_proj.down"), linear("f_b_proj", "f_proj.up")),
    *(vector("A_log", form=PER_HEAD_4D), vector("dt_bias")),
)
KDA_MODULE = (
    *PROJECTIONS,
    convolution("conv1d", "q_conv1d", "k_conv1d", "v_conv1d"),
    *OUTPUT,
    *(
        linear("forget_gate.f_a_proj", "f_proj.down"),
        linear("forget_gate.f_b_proj", "f_proj.up"),
        vector("forget_gate.A_log", "A_log", PER_HEAD_4D),
        vector("forget_gate.dt_bias", "dt_bias"),
    ),
)
LATENT_ATTENTION = (
    *(linear("q_proj"), linear("kv_a_proj_with_mqa", "kv_a_proj")),
    *(norm("kv_a_layernorm", "kv_a_norm"), linear("kv_b_proj"), linear("o_proj")),
)
TRANSFORMERS_MLP = tuple(
    linear(f"block_sparse_moe.{x}_proj", f"mlp.{x}_proj") for x in ("gate", "up", "down")
)
PUBLISHED_NAMES = {
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "conv_size": "short_conv_kernel_size",
}
TRANSFORMERS_NAMES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
LAYER_TYPES = {"linear_attention": "kda", "full_attention": "latent_attention"}


def _layer_mixers(config: CheckpointConfig) -> list[str]:
    config.require(
        hidden_act=("silu",),
        attention_bias=(False,),
        q_lora_rank=(None,),
        mla_use_nope=(True,),
        mla_use_output_gate=(False,),
        attn_res_block_size=(0,),
    )
    decoder.check_dense(_expert_layers(config))
    numbers = range(config["num_hidden_layers"])
    full = config.get("linear_attn_config", {}).get("full_attn_layers")
    if full is None:
        full = [n + 1 for n in numbers if (n + 1) % 4 == 0]
    usual = ["full_attention" if n + 1 in full else "linear_attention" for n in numbers]
    return decoder.mixers(config.get("layer_types") or usual, LAYER_TYPES)


def _expert_layers(config: CheckpointConfig) -> list[int]:
    if not config.get("num_experts"):
        return []
    dense, step = config.get("first_k_dense_replace", 1), config.get("moe_layer_freq", 1)
    usual = [
        "sparse" if n >= dense and n % step == 0 else "dense"
        for n in range(config["num_hidden_layers"])
    ]
    types = config.get("mlp_layer_types") or usual
    return [n for n, mlp in enumerate(types) if mlp != "dense"]


def _kda(config: CheckpointConfig) -> dict[str, Any]:
    names = PUBLISHED_NAMES if "linear_attn_config" in config else TRANSFORMERS_NAMES
    layer = CheckpointConfig(config.get("linear_attn_config", config))
    options = {option: layer[name] for option, name in names.items()}
    return options | {"gate_bias": False, "norm_eps": config["rms_norm_eps"]}


def _latent_attention(config: CheckpointConfig) -> dict[str, Any]:
    return {
        "num_heads": config["num_attention_heads"],
        "kv_rank": config["kv_lora_rank"],
        "head_dim": config["qk_nope_head_dim"],
        "shared_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "norm_eps": config["rms_norm_eps"],
    }


FAMILIES: Mapping[str, Family] = {
    "kimi_linear": Family(
        layer_mixers=_layer_mixers,
        fields=decoder.fields,
        outside=decoder.outside(),
        layer=decoder.layer(),
        blocks=((*decoder.NORMS, *decoder.MLP), (*decoder.NORMS, *TRANSFORMERS_MLP)),
        mixers={
            "kda": MixerFamily("self_attn.", _kda, (KDA, KDA_MODULE)),
            "latent_attention": MixerFamily("self_attn.", _latent_attention, (LATENT_ATTENTION,)),
        },
    )
}
"""By the `model_type` of their `config.json`."""
