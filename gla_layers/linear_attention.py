"""What the linear-attention layers share: everything but their gates and their op.

q, k, v = act(conv(project(x)))             split into heads
o, S    = op(q, k, v, *gates(x))            from the state S
y       = o_proj(norm(o) * act(g_proj(x)))
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from .configuration import check_batch_size, check_options, check_split
from .dot_general import dot_general
from .gated_norm import GatedRMSNorm
from .inputs import check_inputs, check_state, mask_padding
from .kernels.packing import Packing
from .kernels.sharding import splits_time
from .sharding import ShardingConfig, metadata, split_as_x
from .short_convolution import ShortConvolution
from .state import LinearAttentionState

RECURRENT_LENGTH = 2
"""Up to this many tokens from a state run one by one. On a v6e (8 rows, 16 heads of 128) a chunk,
however few of its 128 tokens are there, takes as long as 2.5 (SimpleGLA) to 4.5 (Gated DeltaNet)
tokens of the recurrence."""

default_kernel_init = nnx.initializers.lecun_normal()


@dataclasses.dataclass(frozen=True)
class Heads:
    """Number and size of a layer's heads.

    An output head, whose number is that of the larger group, has a decay and a state of its own.
    Columns of a state do not meet each other, so a value head that is too large for the op goes
    through it as `value_blocks` heads with the same gates.
    """

    query: int
    key: int
    value: int
    output: int
    key_size: int
    value_size: int
    value_blocks: int


class Bottleneck(nnx.Module):
    """Two linear maps through a narrow middle, with nothing between them."""

    def __init__(self, down: nnx.Linear, up: nnx.Linear):
        self.down = down
        self.up = up

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        return self.up(self.down(x))


class LinearAttention(nnx.Module):
    """Base of the layers.

    A subclass adds its op (`_chunk` and `_recurrent`), what the op takes beside q, k and v
    (`_gates`), the parameters of these, the output's norm (`o_norm`), and its gate's projection
    (`g_proj`, or None).
    """

    _chunk: ClassVar[Callable[..., Any]]
    _recurrent: ClassVar[Callable[..., Any]]
    _qk_l2norm: ClassVar[bool]
    o_norm: GatedRMSNorm
    g_proj: nnx.Linear | Bottleneck | None

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: Heads,
        conv_size: int | None,
        conv_bias: bool,
        dtype: jax.typing.DTypeLike | None,
        param_dtype: jax.typing.DTypeLike,
        precision: jax.lax.Precision | str | None,
        kernel_init: nnx.Initializer,
        sharding: ShardingConfig,
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        check_options(
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            sharding=sharding,
            implementation=implementation,
            rngs=rngs,
        )
        check_split("hidden_size", hidden_size, sharding.in_kernel, 0)
        check_split("num_heads", heads.query, sharding.tokens, 2)
        check_split("num_v_heads", heads.output, sharding.tokens, 2)
        self.hidden_size = hidden_size
        self.heads = heads
        self.conv_size = conv_size
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.kernel_init = kernel_init
        self.sharding = sharding
        self.implementation = implementation

        query_features = heads.query * heads.key_size
        key_features = heads.key * heads.key_size
        value_features = heads.value * heads.value_size
        self.q_proj = self._linear(hidden_size, query_features, sharding.in_kernel, rngs)
        self.k_proj = self._linear(hidden_size, key_features, sharding.in_kernel, rngs)
        self.v_proj = self._linear(hidden_size, value_features, sharding.in_kernel, rngs)
        if conv_size is not None:
            self.q_conv1d = self._convolution(query_features, conv_size, conv_bias, rngs)
            self.k_conv1d = self._convolution(key_features, conv_size, conv_bias, rngs)
            self.v_conv1d = self._convolution(value_features, conv_size, conv_bias, rngs)
        output_features = heads.output * heads.value_size
        self.o_proj = self._linear(output_features, hidden_size, sharding.out_kernel, rngs)

    def init_state(self, batch_size: int, max_length: int | None = None) -> LinearAttentionState:
        """The state of sequences that have not begun.

        Args:
            batch_size: number of rows.
            max_length: taken so that all token mixers are called alike; this state has the same
                size for every length.

        Raises:
            ValueError: batch_size is no number of rows.
        """
        del max_length
        check_batch_size(batch_size)
        heads = self.heads
        state_heads = heads.output * heads.value_blocks
        shape = (batch_size, state_heads, heads.key_size, heads.value_size // heads.value_blocks)
        dtype = jnp.float32 if self.dtype is None else jnp.result_type(self.dtype, jnp.float32)
        return LinearAttentionState(
            convolution=tuple(conv.init_state(batch_size) for conv in self._convolutions()),
            recurrent=jnp.zeros(shape, dtype),
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
        state: LinearAttentionState,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LinearAttentionState]: ...

    @split_as_x
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: LinearAttentionState | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], LinearAttentionState]:
        """Mix tokens.

        Args:
            x: inputs `[B, T, hidden_size]`.
            state: what came before each row, from `init_state` or an earlier call.
            segment_ids: a document starts where the id differs from the token before; 0 is
                padding, whose outputs are 0. With a state, a row holds one document.

        Returns:
            The outputs `[B, T, hidden_size]`; with a state also the new one, the state after each
            row's last token that is not padding.

        Raises:
            ValueError: an argument's shape or dtype is wrong, or there is a state and a row of
                segment_ids holds several documents (where they are traced, the row becomes NaN).
        """
        check_inputs(x, self.hidden_size, segment_ids)
        if state is not None:
            check_state(state, jax.eval_shape(lambda: self.init_state(x.shape[0])))
        x = mask_padding(x, segment_ids, one_document=state is not None)
        (q, k, v), convolution = self._project(x, state, segment_ids)
        o, recurrent = self._mix(x, q, k, v, state, segment_ids)
        gate = None if self.g_proj is None else self.g_proj(x)
        o = o.reshape(*o.shape[:2], o.shape[2] * o.shape[3])
        y = self.o_proj(self.o_norm(o, gate, partition=self.sharding.tokens))
        if state is None:
            return y
        return y, LinearAttentionState(convolution, recurrent)

    def _project(self, x, state, segment_ids):
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv_size is None:
            return self._split_heads(*map(self._without_convolution, projected)), ()
        histories = (None, None, None) if state is None else state.convolution
        packing = None if segment_ids is None else Packing.from_segment_ids(segment_ids)
        outputs = [
            conv.within_documents(p, history, packing, self.sharding.tokens)
            for conv, p, history in zip(self._convolutions(), projected, histories, strict=True)
        ]
        if state is None:
            return self._split_heads(*outputs), ()
        outputs, histories = zip(*outputs, strict=True)
        return self._split_heads(*outputs), histories

    def _mix(self, x, q, k, v, state, segment_ids):
        blocks = self.heads.value_blocks
        value_size = self.heads.value_size // blocks
        v = v.reshape(*v.shape[:2], v.shape[2] * blocks, value_size)
        gates = self._gates(x)
        if blocks > 1:
            gates = (jnp.repeat(gate, blocks, axis=2) for gate in gates)
        tokens = q, k, v, *gates
        options = {
            "segment_ids": segment_ids,
            "qk_l2norm": self._qk_l2norm,
            "precision": self.precision,
            "partition": self.sharding.tokens,
        }
        if state is None:
            return self._chunk(*tokens, implementation=self.implementation, **options)
        options |= {
            "initial_state": state.recurrent,
            "output_final_state": True,
            "max_num_segments": None if segment_ids is None else 1,
        }
        if x.shape[1] <= RECURRENT_LENGTH and not splits_time(self.sharding.tokens):
            one_token = x.shape[1] == 1 and segment_ids is None
            implementation = self.implementation if one_token else None
            o, recurrent = self._recurrent(*tokens, implementation=implementation, **options)
        else:
            o, recurrent = self._chunk(*tokens, implementation=self.implementation, **options)
        return o, recurrent if segment_ids is None else recurrent[:, 0]

    def _gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T HV *K"], ...]:
        """What the op takes after q, k and v: decay and, for a delta rule, write strength."""
        raise NotImplementedError

    def _without_convolution(self, x: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        return jax.nn.silu(x)

    def _split_heads(self, q, k, v):
        key_size, value_size = self.heads.key_size, self.heads.value_size
        pairs = (q, key_size), (k, key_size), (v, value_size)
        return tuple(x.reshape(*x.shape[:2], x.shape[2] // size, size) for x, size in pairs)

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        return () if self.conv_size is None else (self.q_conv1d, self.k_conv1d, self.v_conv1d)

    def _linear(
        self,
        in_features: int,
        out_features: int,
        spec: PartitionSpec | None,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = False,
        preferred_element_type: jax.typing.DTypeLike | None = None,
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
            preferred_element_type=preferred_element_type,
            kernel_metadata=metadata(spec),
            bias_metadata=metadata(self.sharding.features),
            rngs=rngs,
        )

    def _bottleneck(
        self,
        out_features: int,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> Bottleneck:
        """A linear map whose rank is the value head's size; `options` are of the second map."""
        rank, sharding = self.heads.value_size, self.sharding
        return Bottleneck(
            self._linear(self.hidden_size, rank, sharding.bottleneck_in_kernel, rngs),
            self._linear(rank, out_features, sharding.bottleneck_out_kernel, rngs, **options),
        )

    def _convolution(
        self, features: int, kernel_size: int, use_bias: bool, rngs: nnx.Rngs
    ) -> ShortConvolution:
        return ShortConvolution(
            features,
            kernel_size=kernel_size,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_metadata=metadata(self.sharding.convolution_kernel),
            bias_metadata=metadata(self.sharding.features),
            implementation=self.implementation,
            rngs=rngs,
        )
