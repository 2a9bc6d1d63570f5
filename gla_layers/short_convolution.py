"""Causal depthwise convolution over a few tokens.

A token sees its own document only: what lies before the document's start is 0 or, for a row's
first document, the history that the state holds.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from .activations import ACTIVATIONS, check_activation_name, implementation_for
from .configuration import check_batch_size, check_options, sizes
from .inputs import check_inputs, check_state
from .kernels.arguments import check_flags
from .kernels.packing import Packing, zero_padding
from .kernels.short_convolution import short_convolution, visible_tokens

default_kernel_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Uniform in `W**-0.5` either way, as torch makes a depthwise convolution."""


default_bias_init = nnx.initializers.zeros_init()


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution with an activation, over documents and from a state.

    `y = conv(x)`, or `y, state = conv(x, state=state)` with `state = conv.init_state(batch_size)`,
    the last `kernel_size - 1` inputs. Computed in float32.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import ShortConvolution
    >>> conv = ShortConvolution(16, kernel_size=4, rngs=nnx.Rngs(0))
    >>> conv(jnp.ones((2, 5, 16))).shape
    (2, 5, 16)
    >>> y, state = conv(jnp.ones((2, 1, 16)), state=conv.init_state(2))
    >>> y.shape, state.shape
    ((2, 1, 16), (2, 3, 16))
    """

    def __init__(
        self,
        features: int,
        *,
        kernel_size: int = 4,
        use_bias: bool = False,
        activation: str = "silu",
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        bias_init: nnx.Initializer = default_bias_init,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Make the convolution.

        Args:
            features: channels.
            kernel_size: W, the number of tokens that an output sees.
            use_bias: whether there is a bias per channel.
            activation: by name; "identity" for none.
            dtype: of the output; None takes the one that x and the kernel promote to.
            param_dtype: of the parameters.
            kernel_init: initializer of the kernel `[kernel_size, features]`.
            bias_init: initializer of the bias `[features]`.
            kernel_metadata: metadata of the kernel.
            bias_metadata: metadata of the bias.
            implementation: of the op; None takes the best for the platform.
            rngs: random keys.

        Raises:
            ValueError: an argument is wrong.
        """
        features, kernel_size = sizes(features=features, kernel_size=kernel_size)
        check_flags(use_bias=use_bias)
        check_options(
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            implementation=implementation,
            rngs=rngs,
        )
        self.features = features
        self.kernel_size = kernel_size
        check_activation_name("activation", activation)
        self.activation = activation
        self.dtype = dtype
        self.implementation = implementation
        self.kernel = nnx.Param(
            kernel_init(rngs.params(), (kernel_size, features), param_dtype), **kernel_metadata
        )
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (features,), param_dtype), **bias_metadata)
            if use_bias
            else nnx.data(None)
        )

    def init_state(self, batch_size: int) -> Float[Array, "B W-1 D"]:
        """The history of a sequence that has not begun: zeros, in float32."""
        check_batch_size(batch_size)
        return jnp.zeros((batch_size, self.kernel_size - 1, self.features), jnp.float32)

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        partition: PartitionSpec | None = None,
    ) -> Float[Array, "B T D"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: Float[Array, "B W-1 D"],
        segment_ids: Int[Array, "B T"] | None = None,
        partition: PartitionSpec | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]: ...

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: Float[Array, "B W-1 D"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        partition: PartitionSpec | None = None,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
        """Convolve.

        Args:
            x: inputs.
            state: the inputs before each row's first document; zeros if None.
            segment_ids: a document starts where the id differs from the token before; 0 is
                padding, whose outputs mean nothing.
            partition: how `[B, T, features]` are split over a mesh with Auto axes.

        Returns:
            The outputs; with a state also the new one, the last inputs of each row's last document.

        Raises:
            ValueError: an argument's shape or dtype is wrong.
        """
        check_inputs(x, self.features, segment_ids)
        if state is not None:
            check_state(state, jax.eval_shape(lambda: self.init_state(x.shape[0])))
        packing = None if segment_ids is None else Packing.from_segment_ids(segment_ids)
        return self.within_documents(zero_padding(x, packing), state, packing, partition)

    def within_documents(
        self,
        x: Float[Array, "B T D"],
        state: Float[Array, "B W-1 D"] | None,
        packing: Packing | None,
        partition: PartitionSpec | None,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
        """`__call__` for padding that holds numbers, which no token of a document sees."""
        size = self.kernel_size - 1
        history, visible = None, None
        if packing is not None:
            document = packing.document
            if state is None:
                document = jnp.where(packing.valid, document, -1)
            visible = visible_tokens(document, size + 1)
        if state is not None:
            inputs = _with_history(x, state.astype(x.dtype), packing)
            history, x = inputs[:, :size], inputs[:, size:]
        y = short_convolution(
            x,
            self.kernel[...],
            None if self.bias is None else self.bias[...],
            history=history,
            visible=visible,
            activation=ACTIVATIONS[self.activation],
            dtype=self.dtype or jnp.result_type(x, self.kernel[...]),
            implementation=implementation_for(self.activation, self.implementation),
            partition=partition,
        )
        if state is None:
            return y
        return y, _history(inputs, packing, size).astype(jnp.float32)


def _with_history(x, state, packing):
    """x with the state's inputs in front of each row's first token that is not padding."""
    if packing is None or x.shape[1] == 0:
        return jnp.concatenate([state, x], axis=1)
    first = jnp.argmax(packing.valid, axis=1)
    insert = jax.vmap(
        lambda row, history, start: jax.lax.dynamic_update_slice_in_dim(row, history, start, 0)
    )
    return insert(_pad_left(x, state.shape[1]), state, first)


def _history(inputs, packing, size):
    """The `size` inputs up to each row's last token, 0 where they are another document's."""
    if packing is None:
        return inputs[:, inputs.shape[1] - size :]
    token = jnp.arange(1, packing.valid.shape[1] + 1)
    end = jnp.max(jnp.where(packing.valid, token, 0), axis=1, initial=0)
    window = end[:, None] + jnp.arange(size)
    document = jnp.take_along_axis(_pad_left(packing.document, size), window, axis=1)
    history = jnp.take_along_axis(inputs, window[..., None], axis=1)
    return jnp.where((document == document[:, -1:])[..., None], history, 0)


def _pad_left(x, size):
    return jnp.pad(x, ((0, 0), (size, 0)) + ((0, 0),) * (x.ndim - 2))
