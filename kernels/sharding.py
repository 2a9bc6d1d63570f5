"""An op on a mesh: every device works on its own batch rows, heads and stretch of time.

A Pallas kernel cannot be partitioned by the compiler, and plain JAX need not be: rows and heads do
not meet in any of the ops. So the whole of an op runs inside `jax.shard_map`, and moves nothing
between devices but, where the time axis is split, states (see `context_parallel.py`). Only a mesh
axis that shards neither, along which all devices do the same, costs an all-reduce of the gradients.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

Axes = str | tuple[str, ...] | None
"""Mesh axes that one axis of an array is split over."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the rows, the tokens and the heads of a call are.

    Attributes:
        mesh: the mesh in whose context the call is.
        rows: the mesh axes that the batch is split over.
        time: the mesh axes that rows are split over into stretches of tokens.
        heads: the mesh axes that key heads and value heads are split over.
    """

    mesh: AbstractMesh
    rows: Axes
    time: Axes
    heads: Axes

    @classmethod
    def of(
        cls, arrays: Mapping[str, Array], partition: P | None, *, parts: str = "heads"
    ) -> Self | None:
        """None where there is nothing to place: no mesh, or one that is the caller's shard_map.

        Args:
            arrays: `[B, T, heads, ...]`, by the names of the arguments that they came as.
            partition: of `[B, T, heads]`; None takes the arrays' own, where their types tell it.
            parts: what an error calls the third axis.

        Raises:
            ValueError: partition needs a mesh, contradicts the arrays' sharding, or does not
                divide their rows and heads.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if partition is not None and mesh.empty:
            raise ValueError(
                f"partition names axes of a mesh, but none is in context; got {partition}, "
                "expected a call within jax.set_mesh(mesh)"
            )
        if mesh.empty or mesh.are_all_axes_manual:
            if partition is not None and _three_axes(partition)[1] is not None:
                raise ValueError(
                    "partition must leave the time axis whole within the caller's own "
                    f"jax.shard_map, got {partition}"
                )
            return None
        if mesh.explicit_axes:
            partition = _explicit_partition(arrays, partition)
        if partition is None:
            return None
        rows, time, heads = _three_axes(partition)
        named = [*_names(rows), *_names(time), *_names(heads)]
        if not set(named) <= set(mesh.axis_names) or len(set(named)) < len(named):
            raise ValueError(
                f"partition must name axes of the mesh, {mesh.axis_names}, each once, "
                f"got {partition}"
            )
        placement = cls(mesh, rows, time, heads)
        for name, x in arrays.items():
            placement.check_divides(name, "batch rows", x.shape[0], rows)
            placement.check_divides(name, "tokens", x.shape[1], time)
            placement.check_divides(name, parts, x.shape[2], heads)
        return placement

    @property
    def split_time(self) -> tuple[str, ...]:
        """The mesh axes that split rows into several stretches; () where rows are whole."""
        return _names(self.time) if self._size(self.time) > 1 else ()

    def run(
        self,
        body: Callable[..., Any],
        tokens: tuple[Array, ...],
        initial_state: Array | None,
        segment_ids: Array | None,
        cu_seqlens: Array | None,
        *,
        state_per_document: bool,
    ) -> tuple[Array, Array | None]:
        """Call `body(tokens, initial_state, segment_ids, cu_seqlens)` on every device."""
        per_token = P(self.rows, self.time, self.heads)
        per_row, per_document = P(self.rows, self.heads), P(self.rows, None, self.heads)
        has_documents = initial_state is not None and initial_state.ndim == 5
        specs = (
            per_token,
            per_document if has_documents else per_row,
            P(self.rows, self.time),
            P(),
        )
        arrays = (tokens, initial_state, segment_ids, cu_seqlens)
        out = (per_token, per_document if state_per_document else per_row)
        return self.on_every_device(body, arrays, specs, out)

    def on_every_device(
        self, body: Callable[..., Any], arrays: tuple[Any, ...], specs: tuple[P, ...], out: Any
    ) -> Any:
        """Call `body(*arrays)` with a device's own part of each array.

        Args:
            body: of arrays, or of pytrees of them.
            arrays: its arguments.
            specs: how each argument is split.
            out: how each result is.
        """
        if self.mesh.explicit_axes:
            arrays = tuple(
                jax.tree.map(lambda x, spec=spec: jax.sharding.reshard(x, spec), array)
                for array, spec in zip(arrays, specs, strict=True)
            )
        return jax.shard_map(
            body,
            axis_names=set(self.mesh.axis_names) - set(self.mesh.manual_axes),
            in_specs=specs,
            out_specs=out,
            check_vma=False,
        )(*arrays)

    def _size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in _names(axes))

    def check_divides(self, name: str, what: str, count: int, axes: Axes) -> None:
        """Raise a ValueError if so many cannot be split over the axes evenly."""
        size = self._size(axes)
        if count % size:
            raise ValueError(
                f"{name} must have a multiple of {size} {what}, the size of the mesh axes "
                f"{_names(axes)} that they are split over, got {count}"
            )


def splits_time(partition: P | None) -> bool:
    """Whether rows lie on several devices of the mesh in context."""
    if partition is None:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape.get(axis, 1) for axis in _names(_three_axes(partition)[1])) > 1


def needs_partition(partition: P | None) -> bool:
    """Whether the compiler is to partition the call, which it cannot do with a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if partition is not None or mesh.empty:
        return False
    return math.prod(mesh.shape[axis] for axis in mesh.auto_axes) > 1


def implementation_on_mesh(implementation: str | None, partition: P | None) -> str | None:
    """The implementation to run, where the compiler cannot partition a kernel plain JAX.

    Raises:
        ValueError: a kernel was asked for there.
    """
    if implementation not in (None, "pallas_tpu") or not needs_partition(partition):
        return implementation
    if implementation == "pallas_tpu":
        raise ValueError(
            "partition must say how [B, T, heads] are split over a mesh with Auto axes, where "
            "implementation='pallas_tpu'; got None"
        )
    warn_of_fallback()
    return "xla"


def warn_of_fallback() -> None:
    """Tell, where the mesh may be of TPUs, that no kernel will run on it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform in (None, "tpu"):
        warnings.warn(
            "implementation=None falls back to plain JAX: the mesh has Auto axes, over which a "
            "TPU kernel is split only as `partition` says",
            skip_file_prefixes=(str(Path(__file__).parent),),
        )


def _explicit_partition(arrays: Mapping[str, Array], partition: P | None) -> P:
    specs = {name: jax.typeof(x).sharding.spec for name, x in arrays.items()}
    first, *_ = specs
    for name, spec in specs.items():
        if len(spec) > 3 and spec[3] is not None:
            raise ValueError(f"{name} must have whole heads on a device, got sharding {spec}")
        if _three_axes(spec) != _three_axes(specs[first]):
            raise ValueError(f"{name} must be sharded as {first} is, {specs[first]}, got {spec}")
    if partition is not None and _three_axes(partition) != _three_axes(specs[first]):
        raise ValueError(f"partition must be {first}'s sharding {specs[first]}, got {partition}")
    return specs[first]


def _three_axes(spec: P) -> tuple[Axes, Axes, Axes]:
    rows, time, heads, *_ = (*(_names(axes) or None for axes in spec), None, None, None)
    return rows, time, heads


def _names(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
