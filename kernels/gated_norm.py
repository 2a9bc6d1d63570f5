"""Gated RMS norm: an op on the heads of every token."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from . import arguments
from .implementation import on_platform
from .sharding import Placement, implementation_on_mesh
from .tpu import gated_norm as tpu
from .tpu.token_blocks import pays
from .xla import gated_norm as xla

_IMPLEMENTATIONS = {"pallas_tpu": tpu, "xla": xla}


class _Options(NamedTuple):
    activation: Callable[[Array], Array]
    epsilon: float
    implementation: str | None


def gated_rms_norm(
    x: Float[Array, "*batch heads*D"],
    gate: Float[Array, "*batch heads*D"] | None,
    scale: Float[Array, " D"],
    *,
    epsilon: float = 1e-5,
    activation: Callable[[Array], Array] = jax.nn.silu,
    implementation: str | None = None,
    partition: PartitionSpec | None = None,
) -> Float[Array, "*batch heads*D"]:
    """Divide every head by its root mean square, scale it, and gate it.

        y = scale * x / sqrt(mean(x**2) + epsilon) * activation(gate)        mean over a head

    Args:
        x: heads, side by side on the last axis.
        gate: as x, or None for a factor of 1.
        scale: `[D]`, the same for every head.
        epsilon: added to the mean square.
        activation: elementwise, computed in float32, of what Pallas lowers for a TPU.
        implementation: "pallas_tpu" (interpreted, slowly, where there is no TPU), "xla" (any
            backend; also called "reference") or None, the best for the platform that the program is
            lowered for, which for rows of less than 128 tokens is plain JAX. Heads that neither
            fill registers of 128 channels nor evenly share them, heads of more than 512, x of other
            than three axes, and float64 are computed in plain JAX whatever it is.
        partition: how `[B, T, heads]` are split over the mesh in context, for x of three axes
            alone. Needed where the mesh has Auto axes; with Explicit ones x's type tells it.

    Returns:
        The outputs, in x's shape and dtype.

    Raises:
        ValueError: an argument's shape, dtype or combination is wrong.

    Example:

    >>> import jax.numpy as jnp
    >>> from gla_layers.kernels.gated_norm import gated_rms_norm
    >>> y = gated_rms_norm(jnp.full((1, 4), 3.0), None, jnp.ones(2))
    >>> [round(value, 3) for value in y[0].tolist()]
    [1.0, 1.0, 1.0, 1.0]
    """
    _check(x, gate, scale)
    arguments.check_implementation(implementation)
    arguments.check_partition(partition)
    arguments.check_activation(activation)
    if not arguments.is_finite_number(epsilon) or epsilon <= 0:
        raise ValueError(f"epsilon must be a finite number above 0, got {epsilon!r}")
    placement = None
    if x.ndim == 3:
        placement = Placement.of({"x": x}, partition, parts="channels")
    elif partition is not None:
        raise ValueError(f"partition is for x of three axes, got shape {x.shape} and {partition}")
    if placement is not None:
        placement.check_divides("x", "heads", x.shape[2] // scale.shape[0], placement.heads)
    unused = implementation is None and not pays(math.prod(x.shape[-2:-1]))
    if unused or implementation == "reference" or not tpu.has_kernel(x, scale):
        implementation = "xla"
    options = _Options(
        activation, float(epsilon), implementation_on_mesh(implementation, partition)
    )
    if placement is None:
        return _core(options, x, gate, scale)
    spec = P(placement.rows, placement.time, placement.heads)
    one_device = functools.partial(_core, options)
    return placement.on_every_device(one_device, (x, gate, scale), (spec, spec, P()), spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(options, x, gate, scale):
    def bind(name):
        forward = _IMPLEMENTATIONS[name].forward
        return functools.partial(forward, options.activation, options.epsilon)

    return on_platform(options.implementation, bind, x, gate, scale)


def _forward(options, *arrays):
    return _core(options, *arrays), arrays


def _backward(options, saved, dy):
    def bind(name):
        backward = _IMPLEMENTATIONS[name].backward
        return functools.partial(backward, options.activation, options.epsilon)

    return on_platform(options.implementation, bind, *saved, dy)


_core.defvjp(_forward, _backward)


def _check(x, gate, scale):
    arguments.check_float("x", x)
    arguments.check_float("scale", scale)
    if scale.ndim != 1 or scale.shape[0] < 1:
        raise ValueError(f"scale must be [D], got shape {scale.shape}")
    if x.ndim < 1 or x.shape[-1] % scale.shape[0]:
        raise ValueError(
            f"x must hold whole heads of {scale.shape[0]} on its last axis, got shape {x.shape}"
        )
    if gate is not None:
        arguments.check_float("gate", gate)
        if gate.shape != x.shape:
            raise ValueError(f"gate must have x's shape {x.shape}, got {gate.shape}")
