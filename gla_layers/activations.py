"""Activations by name, so that a layer's configuration stays plain data."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[Float[Array, "..."]], Float[Array, "..."]]


def _exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def _identity(x):
    return x


def _squared_relu(x):
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Mapping[str, Activation] = {
    "elu": jax.nn.elu,
    "gelu": _exact_gelu,
    "identity": _identity,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sqrelu": _squared_relu,
    "swish": jax.nn.silu,
}


def check_activation_name(argument: str, name: str) -> None:
    """Check the named argument.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{argument} must be one of {sorted(ACTIVATIONS)}, got {name!r}")


WITHOUT_KERNEL = ("elu", "gelu")
"""Pallas lowers neither expm1 nor erfc for a TPU."""


def implementation_for(name: str, implementation: str | None) -> str | None:
    """The implementation of an op with the activation called `name`, where it has a kernel."""
    return "xla" if name in WITHOUT_KERNEL else implementation
