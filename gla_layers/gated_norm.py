"""RMSNorm with an output gate."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .activations import activation as activation_named


class GatedRMSNorm(nnx.Module):
    """`scale * x / sqrt(mean(x**2) + epsilon) * activation(gate)` over the last axis, in float32.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import GatedRMSNorm
    >>> norm = GatedRMSNorm(16, rngs=nnx.Rngs(0))
    >>> norm(jnp.ones((2, 5, 16)), jnp.zeros((2, 5, 16))).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-5,
        use_scale: bool = True,
        activation: str = "swish",
        param_dtype: jnp.dtype = jnp.float32,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        """Make the norm.

        Args:
            num_features: size of the last axis.
            epsilon: added to the mean square.
            use_scale: whether there is a scale per feature.
            activation: of the gate, by name.
            param_dtype: of the scale.
            scale_metadata: metadata of the scale.
            rngs: unused, taken as every layer takes it.
        """
        del rngs
        self.num_features = num_features
        self.epsilon = epsilon
        self.activation = activation
        self._activation = activation_named("activation", activation)
        self.scale = (
            nnx.Param(jnp.ones((num_features,), param_dtype), **scale_metadata)
            if use_scale
            else nnx.data(None)
        )

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        gate: Float[Array, "*batch D"] | None = None,
    ) -> Float[Array, "*batch D"]:
        """Normalise, scale, and gate if there is a gate; the result has x's dtype."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        if self.scale is not None:
            y = y * self.scale[...]
        if gate is not None:
            y = y * self._activation(gate.astype(wide.dtype))
        return y.astype(x.dtype)
