"""Causal softmax attention, the token mixer that hybrids put between linear-attention layers.

    o_t = softmax(q_t K_t^T / sqrt(size)) V_t        over the tokens up to t of t's own document

Plain XLA, with the [T, S] logits in memory. Position is rotary, counted from the document's start,
or none.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .configuration import (
    check_batch_size,
    check_multiple,
    check_options,
    check_split,
    positive,
    sizes,
)
from .inputs import check_inputs, check_state, mask_padding
from .kernels.arguments import check_flags
from .kernels.packing import Packing
from .linear_attention import default_kernel_init
from .sharding import UNANNOTATED, ShardingConfig, metadata
from .state import AttentionState


class Attention(nnx.Module):
    """Causal softmax attention with grouped key and value heads.

    Query head h reads key and value head `h // (num_heads // num_kv_heads)`.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import Attention
    >>> layer = Attention(32, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 32))).shape
    (1, 5, 32)
    >>> y, state = layer(jnp.ones((1, 1, 32)), state=layer.init_state(1, max_length=16))
    >>> y.shape, state.keys.shape
    ((1, 1, 32), (1, 16, 2, 8))
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = 10_000.0,
        use_gate: bool = False,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: nnx.Initializer = default_kernel_init,
        sharding: ShardingConfig = UNANNOTATED,
        rngs: nnx.Rngs,
    ):
        """Make the layer.

        Args:
            hidden_size: size of the inputs and outputs.
            num_heads: query heads.
            num_kv_heads: key and value heads, a divisor of num_heads, which is the default.
            head_dim: size of a head; `hidden_size // num_heads` by default.
            rope_theta: base of the rotary position embedding, or None for no position.
            use_gate: whether the output is multiplied by the sigmoid of a projection of x.
            dtype: of the computation; None takes the one that x and the parameters promote to.
                The softmax is float32 whatever it is.
            param_dtype: of the parameters.
            precision: of the matrix products.
            kernel_init: initializer of the kernels.
            sharding: layout of the parameters over a mesh.
            rngs: random keys.

        Raises:
            ValueError: an argument is wrong, or sizes do not divide over the mesh.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_size, num_heads, num_kv_heads = sizes(
            hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads
        )
        check_multiple("num_heads", num_heads, "num_kv_heads", num_kv_heads)
        if head_dim is None:
            check_multiple("hidden_size", hidden_size, "num_heads", num_heads)
            head_dim = hidden_size // num_heads
        (head_dim,) = sizes(head_dim=head_dim)
        if rope_theta is not None:
            rope_theta = positive("rope_theta", rope_theta)
            if head_dim % 2:
                raise ValueError(
                    f"rope_theta must be None for an odd head_dim, got {rope_theta} with head_dim "
                    f"{head_dim}"
                )
        check_flags(use_gate=use_gate)
        check_options(
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            sharding=sharding,
            rngs=rngs,
        )
        check_split("hidden_size", hidden_size, sharding.in_kernel, 0)
        check_split("num_heads * head_dim", num_heads * head_dim, sharding.in_kernel, 1)
        check_split("num_kv_heads * head_dim", num_kv_heads * head_dim, sharding.in_kernel, 1)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision

        def linear(in_features, out_features, spec):
            return nnx.Linear(
                in_features,
                out_features,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                kernel_init=kernel_init,
                kernel_metadata=metadata(spec),
                rngs=rngs,
            )

        features, kv_features = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = linear(hidden_size, features, sharding.in_kernel)
        self.k_proj = linear(hidden_size, kv_features, sharding.in_kernel)
        self.v_proj = linear(hidden_size, kv_features, sharding.in_kernel)
        self.g_proj = (
            linear(hidden_size, features, sharding.in_kernel) if use_gate else nnx.data(None)
        )
        self.o_proj = linear(features, hidden_size, sharding.out_kernel)

    def init_state(self, batch_size: int, max_length: int) -> AttentionState:
        """An empty cache for rows of at most `max_length` tokens, prompt and answer together.

        Raises:
            ValueError: a size is wrong, or max_length is missing.
        """
        check_batch_size(batch_size)
        (max_length,) = sizes(max_length=max_length)
        shape = (batch_size, max_length, self.num_kv_heads, self.head_dim)
        dtype = self.dtype or self.param_dtype
        return AttentionState(
            keys=jnp.zeros(shape, dtype),
            values=jnp.zeros(shape, dtype),
            length=jnp.zeros((batch_size,), jnp.int32),
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: AttentionState | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], AttentionState]:
        """Mix tokens.

        Args:
            x: inputs `[B, T, hidden_size]`.
            state: what came before each row, from `init_state` or an earlier call.
            segment_ids: a document starts where the id differs from the token before; 0 is
                padding, whose outputs are 0. With a state, a row holds one document.

        Returns:
            The outputs `[B, T, hidden_size]`; with a state also the new one. A row whose tokens no
            longer fit its cache becomes NaN.

        Raises:
            ValueError: an argument's shape or dtype is wrong, T is more than the cache holds, or
                there is a state and a row of segment_ids holds several documents (where they are
                traced, the row becomes NaN).
        """
        check_inputs(x, self.hidden_size, segment_ids)
        if state is not None:
            self._check_state(state, x)
        x = mask_padding(x, segment_ids, one_document=state is not None)
        packing = _packing(x, segment_ids)
        q = self._split_heads(self.q_proj(x), self.num_heads)
        k = self._split_heads(self.k_proj(x), self.num_kv_heads)
        v = self._split_heads(self.v_proj(x), self.num_kv_heads)
        if state is None:
            position = _document_position(packing)
            o = self._attend(
                self._rotate(q, position), self._rotate(k, position), v, _causal_mask(packing)
            )
            return self._output(o, x, packing)
        position = state.length[:, None] + _document_position(packing)
        state = _append(state, self._rotate(k, position), v, position, packing.valid)
        slot = jnp.arange(state.keys.shape[1])
        o = self._attend(
            self._rotate(q, position), state.keys, state.values, slot <= position[..., None]
        )
        fits = state.length <= state.keys.shape[1]
        o = jnp.where(fits[:, None, None, None], o, jnp.nan)
        return self._output(o, x, packing), state

    def _split_heads(self, x, heads):
        return x.reshape(*x.shape[:2], heads, self.head_dim)

    def _rotate(self, x, position):
        if self.rope_theta is None:
            return x
        return rotary_embedding(x, position, self.rope_theta)

    def _attend(self, q, k, v, mask: Bool[Array, "B T S"]) -> Float[Array, "B T H D"]:
        groups = self.num_heads // self.num_kv_heads
        q = q.reshape(*q.shape[:2], self.num_kv_heads, groups, self.head_dim)
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        logits = jnp.einsum(
            "bthgd,bshd->bhgts", q, k, precision=self.precision, preferred_element_type=wide
        )
        logits = jnp.where(mask[:, None, None], logits * self.head_dim**-0.5, -jnp.inf)
        largest = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(wide).min)
        weights = jnp.exp(logits - jax.lax.stop_gradient(largest))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights / jnp.where(total == 0, 1, total)).astype(q.dtype)
        o = jnp.einsum("bhgts,bshd->bthgd", weights, v, precision=self.precision)
        return o.reshape(*o.shape[:2], self.num_heads, self.head_dim)

    def _output(self, o, x, packing):
        o = jnp.where(packing.valid[..., None], o.reshape(*o.shape[:2], -1), 0)
        if self.g_proj is not None:
            o = o * jax.nn.sigmoid(self.g_proj(x))
        return self.o_proj(o)

    def _check_state(self, state, x):
        if not isinstance(state, AttentionState):
            raise ValueError(f"state must be an AttentionState, got {type(state).__name__}")
        max_length = state.keys.shape[1]
        check_state(state, jax.eval_shape(lambda: self.init_state(x.shape[0], max_length)))
        if x.shape[1] > max_length:
            raise ValueError(f"x must have at most max_length = {max_length} tokens, got {x.shape}")


def rotary_embedding(
    x: Float[Array, "B T H D"], position: Int[Array, "B T"], theta: float
) -> Float[Array, "B T H D"]:
    """Rotate channels (i, i + D / 2) by the angle `position * theta**(-2 i / D)`, in float32."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[..., None, None] * frequency
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _packing(x, segment_ids) -> Packing:
    if segment_ids is not None:
        return Packing.from_segment_ids(segment_ids)
    shape = x.shape[:2]
    return Packing(jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool))


def _document_position(packing: Packing) -> Int[Array, "B T"]:
    """How many tokens of its document come before each token."""
    before = jnp.cumsum(packing.valid, axis=1, dtype=jnp.int32) - packing.valid
    starts = jnp.pad(
        packing.document[:, 1:] != packing.document[:, :-1], ((0, 0), (1, 0)), constant_values=True
    )
    return before - jax.lax.cummax(jnp.where(starts, before, 0), axis=1)


def _causal_mask(packing: Packing) -> Bool[Array, "B T T"]:
    token = jnp.arange(packing.document.shape[1])
    same_document = packing.document[:, :, None] == packing.document[:, None, :]
    return (token[:, None] >= token) & same_document & packing.valid[:, None, :]


def _append(state, keys, values, position, valid) -> AttentionState:
    """Write the valid tokens at their positions; a position beyond the cache is not written."""
    max_length = state.keys.shape[1]
    slot = jnp.where(valid, position, max_length)
    row = jnp.arange(slot.shape[0])[:, None]

    def write(cache, new):
        return cache.at[row, slot].set(new.astype(cache.dtype), mode="drop")

    return AttentionState(
        keys=write(state.keys, keys),
        values=write(state.values, values),
        length=state.length + jnp.sum(valid, axis=1, dtype=jnp.int32),
    )
