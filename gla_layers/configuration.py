"""Checks of a layer's configuration."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.export import is_symbolic_dim
from jax.sharding import PartitionSpec

from .kernels.arguments import (
    FLOATS,
    IMPLEMENTATIONS,
    MAX_HEAD_SIZE,
    PRECISIONS,
    is_finite_number,
    is_float_dtype,
    is_integer,
    is_precision,
)
from .sharding import ShardingConfig

_OPTIONS = {
    "dtype": (f"None or one of {FLOATS}", lambda x: x is None or is_float_dtype(x)),
    "param_dtype": (f"one of {FLOATS}", is_float_dtype),
    "precision": (PRECISIONS, is_precision),
    "kernel_init": ("an initializer, such as nnx.initializers.normal()", callable),
    "bias_init": ("an initializer, such as nnx.initializers.zeros_init()", callable),
    "kernel_metadata": ("a mapping", lambda x: isinstance(x, Mapping)),
    "bias_metadata": ("a mapping", lambda x: isinstance(x, Mapping)),
    "scale_metadata": ("a mapping", lambda x: isinstance(x, Mapping)),
    "sharding": ("a ShardingConfig", lambda x: isinstance(x, ShardingConfig)),
    "implementation": (f"one of {IMPLEMENTATIONS}", lambda x: x in IMPLEMENTATIONS),
    "rngs": (
        "an nnx.Rngs with a stream for parameters, such as nnx.Rngs(0)",
        lambda x: isinstance(x, nnx.Rngs) and hasattr(x, "params"),
    ),
}
"""What options that mean the same in every layer are expected to be, and whether a value is."""


def check_options(**options: Any) -> None:
    """Check the named options of those that mean the same in every layer.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    for name, value in options.items():
        expected, accepts = _OPTIONS[name]
        if not accepts(value):
            raise ValueError(f"{name} must be {expected}, got {value!r}")


def sizes(**values: Any) -> tuple[int, ...]:
    """The named arguments, which are to be integers of at least 1, as Python's integers.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    for name, value in values.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return tuple(int(value) for value in values.values())


def check_batch_size(batch_size: int) -> None:
    """Check a number of rows, which may be symbolic in a program that is exported.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if is_symbolic_dim(batch_size):
        return
    if not is_integer(batch_size) or batch_size < 0:
        raise ValueError(f"batch_size must be an integer of at least 0, got {batch_size!r}")


def positive(name: str, value: float) -> float:
    """The named argument, which is to be a finite number above 0, as a Python number.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if not is_finite_number(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def check_multiple(name: str, size: int, divisor_name: str, divisor: int) -> None:
    """Check that one size is a multiple of another.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if size % divisor:
        raise ValueError(f"{name} must be a multiple of {divisor_name} = {divisor}, got {size}")


def check_split(name: str, size: int, spec: PartitionSpec | None, axis: int) -> None:
    """Check that the mesh in context, if any, splits a size evenly along an axis of a spec.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = None if spec is None or axis >= len(spec) else spec[axis]
    if mesh.empty or axes is None:
        return
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(f"sharding must name axes of the mesh, {mesh.axis_names}, got {spec}")
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if size % devices:
        raise ValueError(
            f"{name} must be a multiple of {devices}, the size of the mesh axes {axes} that "
            f"sharding splits it over, got {size}"
        )


def check_key_size(name: str, size: int) -> None:
    """Check that the ops take a query and key head of this size, which comes from an argument.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    if size > MAX_HEAD_SIZE:
        raise ValueError(f"{name} must make key heads of at most {MAX_HEAD_SIZE}, got {size}")


def value_blocks(name: str, size: int) -> int:
    """How many value heads of the op a value head of this size, from an argument, makes.

    Raises:
        ValueError: naming the argument, what came and what is expected.
    """
    blocks = -(-size // MAX_HEAD_SIZE)
    if size % blocks:
        raise ValueError(
            f"{name} must make value heads of at most {MAX_HEAD_SIZE}, or such that {blocks} equal "
            f"parts are, got {size}"
        )
    return blocks


def expanded_size(name: str, factor: float, size_name: str, size: int, heads: int = 1) -> int:
    """`factor * size / heads`, the size of a head, where that is a whole number.

    Raises:
        ValueError: it is not.
    """
    exact = positive(name, factor) * size / heads
    rounded = round(exact)
    if rounded < 1 or abs(exact - rounded) > 1e-5 * rounded:
        over = f" / {heads} heads" if heads > 1 else ""
        raise ValueError(
            f"{name} must make {name} * {size_name}{over} a whole head size, "
            f"got {factor} * {size}{over} = {exact}"
        )
    return rounded
