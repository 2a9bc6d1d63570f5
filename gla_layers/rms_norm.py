"""RMSNorm, whose scale may be centered on 0.

y = scale * x / sqrt(mean(x**2) + epsilon)        mean over the last axis; zero_centered: 1 + scale
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .configuration import check_options, positive, sizes
from .inputs import check_features
from .kernels.arguments import check_flags


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis, computed in float32.

    Example:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from gla_layers import RMSNorm
    >>> norm = RMSNorm(16, zero_centered=True, rngs=nnx.Rngs(0))
    >>> norm(jnp.full((2, 5, 16), 3.0))[0, 0, 0].round(3), norm.scale[0]
    (Array(1., dtype=float32), Array(0., dtype=float32))
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        zero_centered: bool = False,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        """Make the norm.

        Args:
            num_features: size of the last axis.
            epsilon: added to the mean square.
            zero_centered: whether 1 is added to the scale, which then starts from 0.
            param_dtype: of the scale.
            scale_metadata: metadata of the scale.
            rngs: unused, taken as every layer takes it.

        Raises:
            ValueError: an argument is wrong.
        """
        del rngs
        (num_features,) = sizes(num_features=num_features)
        epsilon = positive("epsilon", epsilon)
        check_flags(zero_centered=zero_centered)
        check_options(param_dtype=param_dtype, scale_metadata=scale_metadata)
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        start = jnp.zeros if zero_centered else jnp.ones
        self.scale = nnx.Param(start((num_features,), param_dtype), **scale_metadata)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalise and scale; the result has x's dtype.

        Raises:
            ValueError: x is of another size, or of a type that the layers do not take.
        """
        check_features(x, self.scale.shape[0])
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(wide.dtype)
        if self.zero_centered:
            scale = 1 + scale
        return (wide * (inverse * scale)).astype(x.dtype)
