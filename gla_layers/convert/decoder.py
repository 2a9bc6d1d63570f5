"""What the checkpoints of transformers' decoders share: names outside of mixers, common fields."""

from collections.abc import Sequence
from typing import Any

from .correspondence import embedding, linear, norm
from .family import CheckpointConfig, Rules

MODEL = "model."
NORMS = (norm("input_layernorm", "mixer_norm"), norm("post_attention_layernorm", "mlp_norm"))
MLP = tuple(linear(f"mlp.{x}_proj") for x in ("gate", "up", "down"))


def outside(model: str = MODEL) -> Rules:
    """The tensors outside of the layers; `model` begins the names of all but the head."""
    return (
        embedding(f"{model}embed_tokens", "embed"),
        norm(f"{model}norm", "norm"),
        linear("lm_head", "head"),
    )


def layer(model: str = MODEL) -> str:
    """The prefix of a layer's tensors."""
    return model + "layers.{}."


def fields(config: CheckpointConfig) -> dict[str, Any]:
    """The fields of a `LanguageModelConfig` beside its mixers."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "intermediate_size": config["intermediate_size"],
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "norm_eps": config["rms_norm_eps"],
    }


def gated_deltanet(config: CheckpointConfig) -> dict[str, Any]:
    """The options of a Gated DeltaNet layer."""
    key_size = config["linear_key_head_dim"]
    return {
        "num_heads": config["linear_num_key_heads"],
        "num_v_heads": config["linear_num_value_heads"],
        "head_dim": key_size,
        "expand_v": config["linear_value_head_dim"] / key_size,
        "conv_size": config["linear_conv_kernel_dim"],
        "norm_eps": config["rms_norm_eps"],
    }


def rope(config: CheckpointConfig) -> CheckpointConfig:
    """Where the fields of the rotary embedding are.

    Raises:
        ValueError: it is not the plain one.
    """
    rope = CheckpointConfig(config.get("rope_parameters") or config)
    rope.require(rope_type=("default",), rope_scaling=(None,))
    return rope


def check_dense(expert_layers: Sequence[int]) -> None:
    """Refuse mixtures of experts.

    Raises:
        ValueError: naming the layers that are.
    """
    if expert_layers:
        raise ValueError(
            f"mixtures of experts are not supported, and layers {list(expert_layers)} are some"
        )


def mixers(layer_types: Sequence[str], names: dict[str, str]) -> list[str]:
    """The mixers by the names that a `config.json` has for them.

    Raises:
        ValueError: there is another name.
    """
    unknown = set(layer_types) - names.keys()
    if unknown:
        raise ValueError(
            f"config.json has layer_types {sorted(unknown)}, expected only {sorted(names)}"
        )
    return [names[layer_type] for layer_type in layer_types]
