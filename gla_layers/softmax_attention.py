"""What layers of causal softmax attention share: all but where q, k and v come from.

    o_t = softmax(q_t K_t^T / sqrt(size)) V_t        over the tokens up to t of t's own document
    y   = o_proj(o * sigmoid(g_proj(x)))

Plain XLA, with the [T, S] logits in memory.
"""

from typing import overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from .configuration import check_batch_size, check_options, check_split, sizes
from .dot_general import dot_general
from .inputs import check_inputs, check_state, mask_padding
from .kernels.packing import Packing
from .sharding import ShardingConfig, metadata, split_as_x
from .state import AttentionState


class SoftmaxAttention(nnx.Module):
    """Base of the layers.

    A subclass makes q, k and v (`_project`), and has the output's projection (`o_proj`) and that of
    its gate (`g_proj`, or None). Query head h reads key and value head
    `h // (num_heads // num_kv_heads)`.
    """

    o_proj: nnx.Linear
    g_proj: nnx.Linear | None

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        key_size: int,
        value_size: int,
        dtype: jax.typing.DTypeLike | None,
        param_dtype: jax.typing.DTypeLike,
        precision: jax.lax.Precision | str | None,
        kernel_init: nnx.Initializer,
        sharding: ShardingConfig,
        rngs: nnx.Rngs,
    ):
        check_options(
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            sharding=sharding,
            rngs=rngs,
        )
        check_split("hidden_size", hidden_size, sharding.in_kernel, 0)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.key_size = key_size
        self.value_size = value_size
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.kernel_init = kernel_init
        self.sharding = sharding

    def init_state(self, batch_size: int, max_length: int | None = None) -> AttentionState:
        """An empty cache for rows of at most `max_length` tokens, prompt and answer together.

        It has no default: None is there for what calls all token mixers alike.

        Raises:
            ValueError: a size is wrong, or max_length is missing.
        """
        check_batch_size(batch_size)
        (max_length,) = sizes(max_length=max_length)
        slots = (batch_size, max_length, self.num_kv_heads)
        dtype = self.dtype or self.param_dtype
        return AttentionState(
            keys=jnp.zeros((*slots, self.key_size), dtype),
            values=jnp.zeros((*slots, self.value_size), dtype),
            length=jnp.zeros((batch_size,), jnp.int32),
        )

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: AttentionState,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], AttentionState]: ...

    @split_as_x
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
        position = _document_position(packing)
        if state is None:
            q, k, v = self._project(x, position)
            return self._output(self._attend(q, k, v, _causal_mask(packing)), x, packing)
        position = state.length[:, None] + position
        q, k, v = self._project(x, position)
        state = _append(state, k, v, position, packing.valid)
        slot = jnp.arange(state.keys.shape[1])
        o = self._attend(q, state.keys, state.values, slot <= position[..., None])
        fits = state.length <= state.keys.shape[1]
        o = jnp.where(fits[:, None, None, None], o, jnp.nan)
        return self._output(o, x, packing), state

    def _project(
        self, x: Float[Array, "B T D"], position: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G V"]]:
        """q, k and v of every head, positions embedded."""
        raise NotImplementedError

    def _attend(self, q, k, v, mask: Bool[Array, "B T S"]) -> Float[Array, "B T H V"]:
        groups = self.num_heads // self.num_kv_heads
        q = q.reshape(*q.shape[:2], self.num_kv_heads, groups, self.key_size)
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        logits = jnp.einsum(
            "bthgd,bshd->bhgts", q, k, precision=self.precision, preferred_element_type=wide
        )
        logits = jnp.where(mask[:, None, None], logits * self.key_size**-0.5, -jnp.inf)
        largest = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(wide).min)
        weights = jnp.exp(logits - jax.lax.stop_gradient(largest))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights / jnp.where(total == 0, 1, total)).astype(q.dtype)
        o = jnp.einsum("bhgts,bshd->bthgd", weights, v, precision=self.precision)
        return o.reshape(*o.shape[:2], self.num_heads, self.value_size)

    def _output(self, o, x, packing):
        o = jnp.where(packing.valid[..., None], o.reshape(*o.shape[:2], o.shape[2] * o.shape[3]), 0)
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

    def _linear(
        self,
        in_features: int,
        out_features: int,
        spec: PartitionSpec | None,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = False,
    ) -> nnx.Linear:
        return nnx.Linear(
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            dot_general=dot_general,
            kernel_init=self.kernel_init,
            kernel_metadata=metadata(spec),
            bias_metadata=metadata(self.sharding.features),
            rngs=rngs,
        )


def _packing(x, segment_ids) -> Packing:
    if segment_ids is not None:
        return Packing.from_segment_ids(segment_ids)
    return Packing.unpacked(*x.shape[:2])


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
