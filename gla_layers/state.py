"""What a token mixer carries from one call to the next while decoding."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearAttentionState:
    """State of a linear-attention layer, the same size whatever the length of the sequence.

    Both parts are float32 whatever the layer's dtype, so that a carry keeps its type.

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
