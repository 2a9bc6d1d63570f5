"""Linear-attention layers in Flax NNX.

Every token mixer (`GatedDeltaNet`, `KDA`, `SimpleGLA`, `Attention`, `LatentAttention`) is called
alike:

    y = layer(x)                                             x, y [B, T, hidden_size]
    y = layer(x, segment_ids=segment_ids)                    packed documents; 0 is padding
    state = layer.init_state(batch_size, max_length)
    y, state = layer(x, state=state)                         any number of tokens, continued
    y, state = layer(x, state=state, segment_ids=mask)       with padding on either side

With a state a row holds one document, and the new state is the one after its last token that is
not padding. States are pytrees, passed in and out.
"""

from .attention import Attention
from .gated_deltanet import GatedDeltaNet
from .gated_norm import GatedRMSNorm
from .kda import KDA
from .language_model import LanguageModel, SwiGLU
from .language_model_config import LanguageModelConfig
from .latent_attention import LatentAttention
from .parameters import float32_mask, weight_decay_mask
from .rms_norm import RMSNorm
from .sharding import ShardingConfig
from .short_convolution import ShortConvolution
from .simple_gla import SimpleGLA
from .state import AttentionState, LinearAttentionState

__all__ = [
    "KDA",
    "Attention",
    "AttentionState",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "LanguageModel",
    "LanguageModelConfig",
    "LatentAttention",
    "LinearAttentionState",
    "RMSNorm",
    "ShardingConfig",
    "ShortConvolution",
    "SimpleGLA",
    "SwiGLU",
    "float32_mask",
    "weight_decay_mask",
]
