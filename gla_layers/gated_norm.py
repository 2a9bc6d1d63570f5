"""RMSNorm of every head, with an output gate."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .activations import ACTIVATIONS, check_activation_name, implementation_for
from .configuration import check_options, positive, sizes
from .kernels.arguments import check_flags
from .kernels.gated_norm import gated_rms_norm


class GatedRMSNorm(nnx.Module):
    """RMSNorm over each head of the last axis, times an activated gate, in float32.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import GatedRMSNorm
    >>> norm = GatedRMSNorm(16, rngs=nnx.Rngs(0))
    >>> norm(jnp.ones((2, 5, 4 * 16)), jnp.zeros((2, 5, 4 * 16))).shape
    (2, 5, 64)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        use_scale: bool = True,
        activation: str = "swish",
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Make the norm.

        Args:
            num_features: size of a head.
            epsilon: added to the mean square.
            use_scale: whether there is a scale per feature, the same for every head.
            activation: of the gate, by name.
            param_dtype: of the scale.
            scale_metadata: metadata of the scale.
            implementation: of the op; None takes the best for the platform.
            rngs: unused, taken as every layer takes it.

        Raises:
            ValueError: an argument is wrong.
        """
        del rngs
        (num_features,) = sizes(num_features=num_features)
        epsilon = positive("epsilon", epsilon)
        check_flags(use_scale=use_scale)
        check_options(
            param_dtype=param_dtype, scale_metadata=scale_metadata, implementation=implementation
        )
        self.num_features = num_features
        self.epsilon = epsilon
        check_activation_name("activation", activation)
        self.activation = activation
        self.implementation = implementation
        self.scale = (
            nnx.Param(jnp.ones((num_features,), param_dtype), **scale_metadata)
            if use_scale
            else nnx.data(None)
        )

    def __call__(
        self,
        x: Float[Array, "*batch heads*D"],
        gate: Float[Array, "*batch heads*D"] | None = None,
        *,
        partition: PartitionSpec | None = None,
    ) -> Float[Array, "*batch heads*D"]:
        """Normalise every head, scale, and gate if there is a gate; the result has x's dtype.

        Args:
            x: heads, side by side on the last axis.
            gate: as x.
            partition: how `[B, T, heads]` are split over a mesh with Auto axes.

        Raises:
            ValueError: a dtype is wrong, the last axis of x does not hold whole heads, or gate has
                another shape.
        """
        scale = jnp.ones((self.num_features,)) if self.scale is None else self.scale[...]
        return gated_rms_norm(
            x,
            gate,
            scale,
            epsilon=self.epsilon,
            activation=ACTIVATIONS[self.activation],
            implementation=implementation_for(self.activation, self.implementation),
            partition=partition,
        )
