"""Initial decays: how fast a head forgets before it has learned anything."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1


def log_of_uniform_rate(key: Array, shape: tuple[int, ...], low: float) -> Float[Array, "..."]:
    """`log(A)` with A uniform in (low, 16], never log(0)."""
    return jnp.log(16 - (16 - low) * jax.random.uniform(key, shape, jnp.float32))


def inverse_softplus_step(key: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """The number whose softplus is a time step that is log-uniform in [1e-3, 1e-1]."""
    low, high = np.log(SHORTEST_STEP), np.log(LONGEST_STEP)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, minval=low, maxval=high))
    return step + jnp.log(-jnp.expm1(-step))
