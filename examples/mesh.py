"""The devices of a run: the axes that they form, and how parameters and batches lie on them."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gla_layers import ShardingConfig

AXES = ("data", "fsdp", "sequence", "tensor")
"""What batches are split over, and parameters, and rows, and heads: neighbours exchange most."""

# The vocabulary of bytes is 257, which no axis divides.
TRAINING = dataclasses.replace(ShardingConfig.sequence(), embedding=P(None, "fsdp"))
"""The layout of a model that is trained."""

SAMPLING = dataclasses.replace(TRAINING, tokens=P(None, None, "tensor"))
"""The same parameters for few rows of few tokens, which every device computes in full."""


def make_mesh(description: str | None) -> Mesh:
    """The mesh of all devices, of all processes, that a command line describes.

    Args:
        description: sizes of some of the axes, as `data=2,fsdp=4`; one may be -1, which is what
            the others leave. None is one device, where there is one process.

    Raises:
        ValueError: it is not of this form, or does not use every device.
    """
    if description is None and jax.process_count() == 1:
        return _mesh((1,) * len(AXES), jax.devices()[:1])
    devices = jax.devices()
    expected = f"mesh must be sizes of {', '.join(AXES)} whose product is {len(devices)}, the "
    expected += f"number of devices, as fsdp={len(devices)}; got {description}"
    try:
        pairs = [part.split("=") for part in (description or "").split(",")]
        sizes = {name: int(size) for name, size in pairs}
    except ValueError as error:
        raise ValueError(expected) from error
    if len(sizes) < len(pairs) or not sizes.keys() <= set(AXES) or 0 in sizes.values():
        raise ValueError(expected)
    if list(sizes.values()).count(-1) == 1:
        rest = -math.prod(sizes.values())
        sizes = {name: len(devices) // rest if n == -1 else n for name, n in sizes.items()}
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != len(devices):
        raise ValueError(expected)
    return _mesh([sizes.get(axis, 1) for axis in AXES], devices)


def create[T: nnx.Module](make: Callable[[], T]) -> T:
    """The module that a function makes, of which each device of the mesh in context has its part.

    On one device initializers run one by one, whose programs compile in less than half the time.
    """
    return nnx.jit(make)() if jax.sharding.get_abstract_mesh().size > 1 else make()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of `[batch, time]`: each device has its rows, whole, as a row has one token too many."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def check_divides(mesh: Mesh, batch_size: int, sequence_length: int) -> None:
    """Check that batches and rows can be split evenly.

    Raises:
        ValueError: they cannot.
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    for name, size, parts in (
        ("batch_size", batch_size, rows),
        ("sequence_length", sequence_length, mesh.shape["sequence"]),
    ):
        if size % parts:
            raise ValueError(f"{name} must be a multiple of {parts} on this mesh, got {size}")


def _mesh(sizes: Sequence[int], devices: Sequence[jax.Device]) -> Mesh:
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
