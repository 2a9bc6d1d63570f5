"""OLMo-Hybrid: its Gated DeltaNet layers.

Its attention layers norm what they add to the residual stream, where `LanguageModel` norms what
they read, so whole models are refused.
"""

from collections.abc import Mapping
from typing import Any

from . import decoder
from .correspondence import convolution, linear, norm, vector
from .family import CheckpointConfig, Family, MixerFamily
from .fla import PROJECTIONS

GATED_DELTANET = (
    *PROJECTIONS,
    convolution("conv1d", "q_conv1d", "k_conv1d", "v_conv1d"),
    *(linear(f"{x}_proj") for x in "abg"),
    *(vector("A_log"), vector("dt_bias"), norm("o_norm")),
)


def _gated_deltanet(config: CheckpointConfig) -> dict[str, Any]:
    allow = {"allow_neg_eigval": config.get("linear_allow_neg_eigval", True)}
    return decoder.gated_deltanet(config) | allow | {"norm_eps": 1e-5}


def _layer_mixers(config: CheckpointConfig) -> list[str]:
    raise ValueError("whole models of OLMo-Hybrid are not supported, only their linear layers")


FAMILIES: Mapping[str, Family] = {
    "olmo_hybrid": Family(
        layer_mixers=_layer_mixers,
        fields=decoder.fields,
        outside=(),
        layer=decoder.LAYER,
        blocks=(),
        mixers={"gated_deltanet": MixerFamily("linear_attn.", _gated_deltanet, (GATED_DELTANET,))},
    )
}
"""By the `model_type` of their `config.json`."""
