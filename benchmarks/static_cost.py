"""What a jitted function costs on a TPU generation, counted in the real compiler's output.

libtpu writes the final VLIW schedule of every Pallas kernel, one instruction bundle a cycle, and
XLA writes its own estimate on every operation that it generates itself:

    kernel   max(bundles, each times the trip counts of the loops around it; bytes / bandwidth)
    program  sum over kernels + sum of XLA's estimates, times the trip counts of its while loops

Latency between dependent instructions is in, as the scheduler leaves bundles empty; stalls of DMA
and semaphores are not. A predicated region counts as always taken. Of eight published times of one
library's kernels on a v6e chip this gives 0.85 to 1.08; programs of XLA's loops alone are counted
1.4 to 1.7 times too high. So it compares two programs on one target; below 10 % is noise.
"""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from .hlo import Operation, Program
from .tpu_compiler import TARGETS, Target, compile_for
from .transfers import Transfers

DUMP = Path(tempfile.mkdtemp(prefix="static_cost_"))
"""Where the compiler writes its schedules. It reads the flags when it is first used."""

_FLAGS = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"
os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS}".strip()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas kernel of a program.

    Attributes:
        name: the kernel's.
        calls: how often the program runs it.
        issue: cycles by its schedule.
        num_bytes: of operands and results in HBM.
        memory: cycles that these bytes take.
        busy: how much of each slot of the bundles is used, by slot name.
    """

    name: str
    calls: int
    issue: float
    num_bytes: int
    memory: float
    busy: dict[str, float]

    @property
    def cycles(self) -> float:
        return max(self.issue, self.memory)


@dataclasses.dataclass(frozen=True)
class StaticCost:
    """Cost of a program.

    Attributes:
        target: name of the generation.
        kernels: its Pallas kernels.
        xla: cycles of XLA's operations, by name, the largest first.
        product_cycles: of those that multiply matrices.
        waiting_cycles: for copies that run beside the operations; not among the others, which are
            what the program computes.
        temporary_bytes: HBM for what is neither argument nor result.
        aliased_bytes: of results that take the place of arguments.
        unknown_loops: loops whose trip count the compiler's output does not tell, counted once.
    """

    target: str
    kernels: tuple[Kernel, ...]
    xla: dict[str, float]
    product_cycles: float
    waiting_cycles: float
    temporary_bytes: int
    aliased_bytes: int
    unknown_loops: int

    @property
    def kernel_cycles(self) -> float:
        return sum(kernel.cycles * kernel.calls for kernel in self.kernels)

    @property
    def xla_cycles(self) -> float:
        return sum(self.xla.values())

    @property
    def cycles(self) -> float:
        return self.kernel_cycles + self.xla_cycles


def static_cost(
    target: str, fn: Callable, *args, donate_argnums: tuple[int, ...] = ()
) -> StaticCost:
    """Compile `fn` for `target` (see `compile_for`) and count what it costs."""
    before = set(DUMP.iterdir())
    compiled = compile_for(target, fn, *args, donate_argnums=donate_argnums)
    dumped = set(DUMP.iterdir()) - before
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    program = Program(text)
    schedules = Schedules(program, TARGETS[target], dumped)
    xla: dict[str, float] = {}
    product_cycles = 0.0
    transfers = Transfers(TARGETS[target])
    for operation in program.operations():
        if operation.is_kernel:
            cycles = operation.times * schedules.add(operation).cycles
        else:
            cycles = operation.times * operation.estimated_cycles(TARGETS[target])
            if cycles:
                xla[operation.name] = xla.get(operation.name, 0) + cycles
            if program.multiplies_matrices(operation):
                product_cycles += cycles
        transfers.run(operation, cycles, operation.times * program.hbm_bytes(operation))
    for path in dumped:
        path.unlink()
    return StaticCost(
        target,
        tuple(sorted(schedules.kernels.values(), key=lambda k: -k.cycles * k.calls)),
        dict(sorted(xla.items(), key=lambda item: -item[1])),
        product_cycles,
        transfers.waiting_cycles,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        program.unknown_loops + schedules.unknown_loops,
    )


class Schedules:
    """The kernels of a program, by the schedules that the compiler wrote of them."""

    def __init__(self, program: Program, target: Target, dumped: set[Path]):
        self.kernels: dict[str, Kernel] = {}
        self.unknown_loops = 0
        self._program = program
        self._target = target
        self._schedules = _files(dumped, r"^\d+-(.*)-\d+-final_bundles\.txt$")
        self._utilizations = _files(
            dumped, r"^\d+-(.*)-\d+-final_hlo-static-per-bundle-utilization\.txt$"
        )
        # The compiler schedules identical kernels once.
        self._bodies = dict(
            re.findall(
                r'%([\w.\-]+) = [^\n]*custom_call_target="tpu_custom_call"'
                r'[^\n]*"body":"([^"]*)"',
                program.text,
            )
        )
        self._twins = {self._bodies[name]: name for name in self._schedules if name in self._bodies}

    def add(self, operation: Operation) -> Kernel:
        """Count a kernel's calls, and what one costs."""
        name = operation.name
        if name in self.kernels:
            kernel = self.kernels[name]
            calls = kernel.calls + operation.times
            self.kernels[name] = dataclasses.replace(kernel, calls=calls)
            return self.kernels[name]
        scheduled = name if name in self._schedules else self._twins.get(self._bodies.get(name))
        if scheduled is None:
            raise RuntimeError(f"the compiler wrote no schedule of the kernel {name}")
        schedule = Schedule(self._schedules[scheduled])
        self.unknown_loops += schedule.unknown_loops
        num_bytes = self._program.hbm_bytes(operation)
        self.kernels[name] = Kernel(
            name,
            operation.times,
            schedule.cycles,
            num_bytes,
            self._target.memory_cycles(num_bytes),
            schedule.busy(self._utilizations.get(scheduled)),
        )
        return self.kernels[name]


class Schedule:
    """A kernel's bundles, each weighted by the trip counts of the loops around it."""

    _BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2}|)\s*:\s*((?:>\s*)*)\{")
    _EXIT = re.compile(r"/\* loop exit test")
    _EXIT_BOUND = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test")

    def __init__(self, path: Path):
        self.unknown_loops = 0
        self._weights: dict[int, int] = {}
        self.cycles = self._weigh(self._read(path), 1)

    def busy(self, utilization: Path | None) -> dict[str, float]:
        """The share of each slot that holds an instruction."""
        lines = utilization.read_text().splitlines() if utilization else []
        start = next((i for i, line in enumerate(lines) if line.startswith("== UTIL")), None)
        if start is None:
            return {}
        slots = [name.strip() for name in lines[start - 2].split(",")]
        capacity = [int(x) for x in lines[start - 1].split()]
        used = [0] * len(slots)
        for row, line in enumerate(lines[start + 1 :]):
            values = line.split()
            if len(values) == len(slots):
                weight = self._weights.get(row, 0)
                used = [u + int(v) * weight for u, v in zip(used, values, strict=True)]
        return {
            slot: u / (c * max(self.cycles, 1))
            for slot, c, u in zip(slots, capacity, used, strict=True)
        }

    def _read(self, path: Path) -> "_Loop":
        root = _Loop(trips=1)
        open_loops, row = [root], 0
        for line in path.read_text(errors="replace").splitlines():
            bundle = self._BUNDLE.match(line)
            if not bundle:
                continue
            label, marks = bundle.groups()
            empty = line[bundle.end() - 1 :].startswith("{}")
            depth = len(open_loops) - 1 if empty else marks.count(">")
            del open_loops[depth + 1 :]
            if label == "LB" and depth and len(open_loops) - 1 == depth:
                open_loops.pop()  # a loop right after its sibling
            while len(open_loops) - 1 < depth:
                open_loops[-1].inner.append(_Loop())
                open_loops.append(open_loops[-1].inner[-1])
            open_loops[-1].rows.append(row)
            row += 1
            if bound := self._EXIT_BOUND.search(line):
                open_loops[-1].trips = int(bound.group(1))
        return root

    def _weigh(self, loop: "_Loop", times: int) -> int:
        if loop.trips is None:
            self.unknown_loops += 1
        times *= loop.trips or 1
        self._weights.update(dict.fromkeys(loop.rows, times))
        return len(loop.rows) * times + sum(self._weigh(inner, times) for inner in loop.inner)


@dataclasses.dataclass
class _Loop:
    trips: int | None = None
    rows: list[int] = dataclasses.field(default_factory=list)
    inner: list["_Loop"] = dataclasses.field(default_factory=list)


def _files(paths: set[Path], pattern: str) -> dict[str, Path]:
    return {m.group(1): path for path in paths if (m := re.match(pattern, path.name))}
