"""Checkpoints of flash-linear-attention: Gated DeltaNet, KDA, SimpleGLA, hybrids with attention.

The library has a layer of SimpleGLA and no model: one is read and written as its other models are.
"""

from collections.abc import Mapping
from typing import Any

from ..language_model_config import LanguageModelConfig
from .correspondence import bias, convolution, embedding, linear, norm, vector
from .family import CheckpointConfig, Family, MixerFamily, Rules, all_options

MODEL_FIELDS = (
    *("vocab_size", "hidden_size", "num_layers", "intermediate_size", "tie_embeddings"),
    "norm_eps",
)
"""The fields of a `LanguageModelConfig` that a `config.json` holds."""

MIXER_FIELDS = {
    "gated_deltanet": (
        *("num_heads", "head_dim", "num_v_heads", "expand_v", "use_gate", "gate_activation"),
        *("use_short_conv", "conv_size", "allow_neg_eigval", "norm_eps"),
    ),
    "kda": (
        *("num_heads", "head_dim", "num_v_heads", "expand_v", "use_short_conv", "conv_size"),
        *("allow_neg_eigval", "safe_gate", "lower_bound", "norm_eps"),
    ),
    "simple_gla": (
        *("num_heads", "num_kv_heads", "expand_k", "expand_v", "feature_map", "gate_fn"),
        *("gate_logit_normalizer", "use_short_conv", "conv_size", "elementwise_affine"),
        "norm_eps",
    ),
    "attention": ("num_heads", "num_kv_heads", "rope_theta", "qkv_bias"),
}
"""The options of each mixer that it holds; those of attention are in its `attn`."""

NAMES = {
    "gate_activation": "output_gate_activation",
    "num_layers": "num_hidden_layers",
    "tie_embeddings": "tie_word_embeddings",
}
"""Their names there, where they differ."""

ARCHITECTURES = {
    "gated_deltanet": "GatedDeltaNetForCausalLM",
    "kda": "KDAForCausalLM",
    "simple_gla": "SimpleGLAForCausalLM",
}

PROJECTIONS = tuple(linear(f"{x}_proj") for x in "qkvo")
ATTENTION = (*PROJECTIONS, *(bias(f"{x}_proj") for x in "qkv"))
CONVOLVED = (
    *PROJECTIONS,
    *(convolution(f"{x}_conv1d") for x in "qkv"),
)
GATED_DELTANET = (
    *CONVOLVED,
    *(linear(f"{x}_proj") for x in "abg"),
    *(vector("A_log"), vector("dt_bias"), norm("o_norm")),
)
KDA = (
    *CONVOLVED,
    *(linear("f_proj.0", "f_proj.down"), linear("f_proj.1", "f_proj.up"), linear("b_proj")),
    *(linear("g_proj.0", "g_proj.down"), linear("g_proj.1", "g_proj.up")),
    bias("g_proj.1", "g_proj.up"),
    *(vector("A_log"), vector("dt_bias"), norm("o_norm")),
)
SIMPLE_GLA = (*CONVOLVED, linear("g_proj"), linear("gk_proj"), bias("gk_proj"))
LAYOUTS: Mapping[str, tuple[Rules, ...]] = {
    "gated_deltanet": (GATED_DELTANET,),
    "kda": (KDA,),
    "simple_gla": (
        (*SIMPLE_GLA, norm("g_norm_swish_gate", "o_norm")),
        (*SIMPLE_GLA, norm("g_norm", "o_norm")),
    ),
}
BLOCK = (
    *(norm("attn_norm", "mixer_norm"), norm("mlp_norm")),
    *(linear(f"mlp.{x}_proj") for x in ("gate", "up", "down")),
)
OUTSIDE = (
    embedding("model.embeddings", "embed"),
    norm("model.norm", "norm"),
    linear("lm_head", "head"),
)


def _family(mixer: str) -> Family:
    """The models whose layers are of one linear-attention mixer, or of attention."""

    def layer_mixers(config: CheckpointConfig) -> list[str]:
        config.require(hidden_act=("swish", "silu"), attnres_block_size=(None,))
        with_attention = _attention(config)["layers"]
        numbers = range(config["num_hidden_layers"])
        return ["attention" if number in with_attention else mixer for number in numbers]

    def write_config(config: LanguageModelConfig) -> dict[str, Any]:
        options = _write(mixer, config)
        if options.get("gate_fn", "swish") != "swish":
            raise ValueError(f"gate_fn must be 'swish' to be written, got {options['gate_fn']!r}")
        layers = [n for n, name in enumerate(config.layer_mixers) if name == "attention"]
        attention = {"layers": layers, **_write("attention", config)} if layers else None
        return {
            "model_type": mixer,
            "architectures": [ARCHITECTURES[mixer]],
            "attn": attention,
            **options,
            **{_name(field): getattr(config, field) for field in MODEL_FIELDS},
        }

    return Family(
        layer_mixers=layer_mixers,
        fields=lambda config: {field: _complete(config)[_name(field)] for field in MODEL_FIELDS},
        outside=OUTSIDE,
        layer="model.layers.{}.",
        blocks=(BLOCK,),
        mixers={
            mixer: MixerFamily("attn.", lambda config: _options(mixer, config), LAYOUTS[mixer]),
            "attention": MixerFamily(
                "attn.", lambda config: _options("attention", _attention(config)), (ATTENTION,)
            ),
        },
        write_config=write_config,
    )


def _attention(config: CheckpointConfig) -> CheckpointConfig:
    """The settings of the attention layers, which must be the same for all of them."""
    specs = config.get("attn") or []
    specs = [CheckpointConfig(spec) for spec in ([specs] if isinstance(specs, dict) else specs)]
    layers = [number for spec in specs for number in spec["layers"]]
    kinds = [{key: spec[key] for key in spec if key != "layers"} for spec in specs]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            f"config.json has attention layers of several kinds, {kinds}, expected one"
        )
    settings = CheckpointConfig({"rope_theta": 10_000.0} | (kinds[0] if kinds else {}))
    settings.require(window_size=(None,))
    return CheckpointConfig(settings, layers=layers)


def _complete(config: CheckpointConfig) -> CheckpointConfig:
    """The config with what it may leave out."""
    width = config.get("intermediate_size")
    if width is None:
        exact = int(config["hidden_size"] * (config.get("hidden_ratio") or 4) * 2 / 3)
        width = -(-exact // 256) * 256
    return CheckpointConfig({"tie_word_embeddings": False} | config | {"intermediate_size": width})


def _name(field: str) -> str:
    return NAMES.get(field, field)


def _options(mixer: str, config: CheckpointConfig) -> dict[str, Any]:
    """The options of a mixer, without those that the config leaves at their default."""
    names = {field: _name(field) for field in MIXER_FIELDS[mixer]}
    present = {field: config[name] for field, name in names.items() if name in config}
    return {"num_heads": config["num_heads"]} | present


def _write(mixer: str, config: LanguageModelConfig) -> dict[str, Any]:
    options = all_options(mixer, config.mixer_options.get(mixer, {}))
    return {_name(field): options[field] for field in MIXER_FIELDS[mixer]}


FAMILIES: Mapping[str, Family] = {mixer: _family(mixer) for mixer in LAYOUTS}
"""By the `model_type` of their `config.json`."""
