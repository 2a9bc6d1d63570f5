"""Calls of Pallas TPU kernels: compiled for a TPU, interpreted on any other platform."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl


def pallas_call(kernel: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """`pl.pallas_call`, interpreted where the program is lowered for anything but a TPU.

    The platform is decided in the program, so that a machine without a TPU can lower for one.
    """
    compiled = pl.pallas_call(kernel, **options)
    interpreted = pl.pallas_call(kernel, interpret=True, **options)

    def apart(*operands):
        # XLA for a CPU would fold a transposition into the next kernel's product of bfloat16, and
        # then not run it.
        return jax.lax.optimization_barrier(interpreted(*operands))

    @jax.custom_jvp
    def call(*operands):
        return jax.lax.platform_dependent(*operands, tpu=compiled, default=apart)

    @call.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            f"the TPU kernel {options['name']} has no derivative, as for gradients of gradients; "
            "implementation='xla' has"
        )

    return call
