"""What a program's devices exchange, read from the optimized HLO."""

import dataclasses
import math
import re
from typing import Self

from .hlo import Operation, Program, array_shapes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange.

    Attributes:
        kind: one of `KINDS`.
        shapes: of the arrays, gathered or not yet scattered.
        num_bytes: of these.
        devices: how many exchange with each other.
        times: how often it runs.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    devices: int
    times: int

    @property
    def sent_bytes(self) -> float:
        """What each device sends in all, if everything goes round a ring."""
        share = (self.devices - 1) / self.devices
        rounds = {"all-reduce": 2 * share, "collective-permute": 1}.get(self.kind, share)
        return rounds * self.num_bytes * self.times

    @classmethod
    def parse(cls, operation: Operation) -> Self | None:
        """The collective that an operation is, or None."""
        match = re.match(rf"(\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(", operation.rest)
        if match is None:
            return None
        result, kind, started = match.groups()
        arrays = array_shapes(result)
        if started and kind in ("all-gather", "collective-permute"):
            arrays = arrays[1:2]  # of operand, result and contexts
        devices = _group_size(operation.rest)
        shapes = tuple(shape for shape, _, _ in arrays)
        num_bytes = sum(size for _, size, _ in arrays)
        if operation.computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        elif kind == "reduce-scatter":
            num_bytes *= devices
        return cls(kind, shapes, num_bytes, devices, operation.times)


def collectives(program: Program) -> list[Collective]:
    """All that run, each once: the parts of an asynchronous one share a channel."""
    found: dict[str, Collective] = {}
    for operation in program.operations():
        for part in (operation, *program.fused(operation)):
            collective = Collective.parse(part)
            if collective is not None:
                channel = re.search(r"channel_id=(\d+)", part.rest)
                found.setdefault(channel.group(1) if channel else part.name, collective)
    return list(found.values())


def _group_size(rest: str) -> int:
    """How many devices a replica group has, in each of the notations of HLO."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return listed.group(1).count(",") + 1
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    if counted:
        return int(counted.group(1))
    named = re.search(r"replica_groups=\w*\[([^\]]*)\] \{([^}]*)\}", rest)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named.group(2)))
    return 2  # a permutation has pairs
