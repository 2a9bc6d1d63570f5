"""Linear-attention ops: whole sequences by chunks, and a few tokens from a state."""

from .gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from .gla import chunk_gla, recurrent_gla
from .kda import chunk_kda, recurrent_kda
from .simple_gla import chunk_simple_gla, recurrent_simple_gla

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_simple_gla",
]
