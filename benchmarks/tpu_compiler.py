"""Compile for a TPU generation with no TPU attached: libtpu does so on any x86-64 Linux host.

libtpu reads its settings when it is first used; JAX itself stays on the CPU.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else a second process aborts


@dataclasses.dataclass(frozen=True)
class Target:
    """A TPU generation, by its public figures for the part of a chip that is one JAX device.

    On v4 and v5p a device is a chip of two TensorCores, which share a program's parallel grid
    axes; on v7x each of a chip's two TensorCores is a device.

    Attributes:
        topology: the smallest that libtpu compiles for.
        clock_ghz: of the TensorCore.
        hbm_gb_per_s: memory bandwidth.
        hbm_gb: memory.
        ici_gb_per_s: bandwidth to the other chips of a pod, all links together.
    """

    topology: str
    clock_ghz: float
    hbm_gb_per_s: float
    hbm_gb: int
    ici_gb_per_s: float

    def memory_cycles(self, num_bytes: float) -> float:
        """Cycles that moving so many bytes takes at the full bandwidth."""
        return num_bytes * self.clock_ghz / self.hbm_gb_per_s


TARGETS = {
    "v4": Target("v4:2x2x1", 1.05, 1228, 32, 300),
    "v5e": Target("v5e:2x2", 1.5, 819, 16, 200),
    "v5p": Target("v5p:2x2x1", 1.75, 2765, 95, 600),
    "v6e": Target("v6e:2x2", 1.75, 1640, 32, 448),
    "v7x": Target("tpu7x:2x2x1", 1.9, 3690, 96, 600),
}


def pod(
    target: str, chips: str, axes: Mapping[str, int], axis_type: AxisType = AxisType.Auto
) -> Mesh:
    """A mesh over the devices of a pod slice that is not there.

    Args:
        target: a name in `TARGETS`.
        chips: the slice, as "16x16".
        axes: the sizes of the mesh's axes, by name.
        axis_type: of all of them.
    """
    name = TARGETS[target].topology.split(":")[0]
    return _mesh(f"{name}:{chips}", axes, axis_type)


def compile_for(
    target: str,
    fn: Callable,
    *args,
    donate_argnums: tuple[int, ...] = (),
    mesh: Mesh | None = None,
) -> jax.stages.Compiled:
    """Compile `fn` for one device of a generation, or for a mesh of its devices.

    Args:
        target: a name in `TARGETS`.
        fn: what `jax.jit` takes.
        *args: arrays or `jax.ShapeDtypeStruct`s, in any pytree; with a mesh, each with its
            sharding.
        donate_argnums: as `jax.jit` has it.
        mesh: see `pod`.
    """
    if mesh is None:
        mesh = _mesh(TARGETS[target].topology, {"_": 1}, AxisType.Auto)
        everywhere = NamedSharding(mesh, P())
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args
        )
    # Lowering a kernel for a TPU on a host without one needs a TPU mesh in context.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _never_stored():
        traced = jax.jit(fn, donate_argnums=donate_argnums).trace(*args)
        return traced.lower(lowering_platforms=("tpu",)).compile()


@contextlib.contextmanager
def _never_stored() -> Iterator[None]:
    """Keep programs out of JAX's cache on disk: what is read from there has no text."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _mesh(topology: str, axes: Mapping[str, int], axis_type: AxisType) -> Mesh:
    described = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    sizes = tuple(axes.values())
    devices: np.ndarray = np.array(described[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(sizes))
