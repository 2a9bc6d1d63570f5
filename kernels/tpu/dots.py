"""Matrix products with float32 accumulation, whose precision never goes unsaid.

A TPU rounds float32 operands to bfloat16 unless told otherwise; interpret mode on a CPU does not,
so that a forgotten precision would pass every test on a CPU.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EXACT = jax.lax.Precision.HIGHEST

Contraction = tuple[tuple[int], tuple[int]]
NN: Contraction = ((1,), (0,))
NT: Contraction = ((1,), (1,))
TN: Contraction = ((0,), (0,))


def dot(
    a: Float[Array, "M K"],
    b: Float[Array, "K N"],
    precision: jax.lax.Precision | None,
    contraction: Contraction = NN,
) -> Float[Array, "M N"]:
    """`a @ b`, or `a @ b.T` (NT), or `a.T @ b` (TN), in float32.

    Args:
        a: bfloat16 or float32, as b.
        b: `[K, N]`, or `[N, K]` with NT.
        precision: of the product of float32 operands; None is float32 accuracy. Products of
            bfloat16 numbers are exact in any case.
        contraction: which axes are summed over.
    """
    if a.dtype == jnp.bfloat16:
        precision = jax.lax.Precision.DEFAULT
    elif precision is None:
        precision = EXACT
    return jax.lax.dot_general(
        a,
        b,
        (contraction, ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
