"""Token mixers as a model sees them, and what they carry from one call to the next."""

import dataclasses
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearAttentionState:
    """State of a linear-attention layer, the same size whatever the length of the sequence.

    Both parts are float32 whatever the layer's dtype, so that a carry keeps its type; but with a
    dtype of float64 the recurrent state is float64.

    Attributes:
        convolution: the last `conv_size - 1` inputs of the short convolutions of q, k and v, each
            `[B, conv_size - 1, channels]`, oldest first; empty for a layer without convolutions.
        recurrent: the matrix that each head reads and writes, `[B, heads, K, V]`; a head with a
            value size above 256 has several, of equal parts of its values.
    """

    convolution: tuple[Float[Array, "B W-1 _"], ...]
    recurrent: Float[Array, "B HV K V"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionState:
    """Keys and values of a softmax-attention layer, in a cache of fixed length.

    Attributes:
        keys: `[B, max_length, heads, size]`, position embeddings applied.
        values: `[B, max_length, heads, size]`.
        length: tokens held by each row, `[B]`; row b fills the slots below `length[b]`.
    """

    keys: Float[Array, "B S H D"]
    values: Float[Array, "B S H D"]
    length: Int[Array, " B"]


class TokenMixer(Protocol):
    """A module that mixes the tokens of a row: any of this library's, or one of your own."""

    def init_state(self, batch_size: int, max_length: int | None = None) -> Any:
        """The state of rows that have not begun."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: Any = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Any:
        """The outputs `[B, T, D]`; with a state also the new one."""
