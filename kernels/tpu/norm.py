"""Division of q and k by their norms, in float32, and its gradient.

x_hat = r x          r = (sum(x^2) + 1e-6)^(-1/2)
dx = r (dx_hat - x_hat sum(x_hat dx_hat))
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6


def normalize(x: Float[Array, "C D"]) -> tuple[Float[Array, "C D"], Float[Array, "C 1"]]:
    """x divided by its norm, in float32, and what it was multiplied by."""
    x = x.astype(jnp.float32)
    inverse_norm = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + EPSILON)
    return x * inverse_norm, inverse_norm


def normalize_gradient(
    normalized: Float[Array, "C D"],
    inverse_norm: Float[Array, "C 1"],
    gradient: Float[Array, "C D"],
) -> Float[Array, "C D"]:
    """The gradient of x from that of x divided by its norm."""
    along = jnp.sum(normalized * gradient, axis=1, keepdims=True)
    return inverse_norm * (gradient - normalized * along)
