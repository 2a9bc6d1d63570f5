"""The numbers that both the plain-JAX forms and the TPU kernels are computed in."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

SMALLEST_DECAY = -128.0
"""exp of it is exactly 0 in float32: any g below acts the same, and -inf - -inf never arises."""

SMALLEST_BETA = 2.0**-60


def storage_dtype(*arrays: Array | jax.ShapeDtypeStruct) -> jnp.dtype:
    """The type of operands and residuals: bfloat16 where all of q, k and v are, else float32."""
    all_bfloat16 = all(x.dtype == jnp.bfloat16 for x in arrays)
    return jnp.dtype(jnp.bfloat16 if all_bfloat16 else jnp.float32)


def divisible(beta: Float[Array, "..."]) -> Float[Array, "..."]:
    """beta in float32, 2^-60 in place of 0: what is proportional to it is divided by it."""
    beta = beta.astype(jnp.float32)
    return jnp.where(jnp.abs(beta) < SMALLEST_BETA, SMALLEST_BETA, beta)
