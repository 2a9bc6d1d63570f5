"""The text of an optimized HLO program, operation by operation, with how often each runs."""

import dataclasses
import math
import re
from collections.abc import Iterator

from .tpu_compiler import Target


@dataclasses.dataclass(frozen=True)
class Operation:
    """A line of HLO.

    Attributes:
        computation: the name of the computation that holds it.
        name: its own.
        rest: the line from the result's shape on.
        times: how often it runs.
    """

    computation: str
    name: str
    rest: str
    times: int

    @property
    def is_kernel(self) -> bool:
        return 'custom_call_target="tpu_custom_call"' in self.rest

    def estimated_cycles(self, target: Target) -> float:
        """XLA's estimate of running it once; 0 where there is none."""
        estimate = re.search(r'estimated_cycles":"(\d+)"', self.rest)
        if estimate:
            return int(estimate.group(1))
        moved = re.match(
            r"(\S+) (reshape|copy|transpose|concatenate|pad|slice|dynamic-slice|gather|scatter"
            r"|sort|convert|reduce)\(",
            self.rest,
        )
        if not moved:
            return 0
        # A relayout that XLA gives no estimate: its result written once, and as much read.
        num_bytes = 2 * hbm_bytes(moved.group(1))
        return target.memory_cycles(num_bytes) if num_bytes > 1 << 16 else 0


class Program:
    """An optimized HLO program.

    Attributes:
        unknown_loops: how many of the loops that `operations` has gone through tell no trip count
            and are taken to run once.
    """

    def __init__(self, text: str):
        self.text = text
        self.unknown_loops = 0
        self._computations = _computations(text)
        self._shapes: dict[str, dict[str, str]] = {}

    def operations(self, computation: str = "ENTRY", times: int = 1) -> Iterator[Operation]:
        """All that runs; a fusion is one operation, loops and calls are what they run."""
        for operation in self._lines(computation, times):
            if operation.is_kernel:
                yield operation
            elif re.search(r"\bwhile\(", operation.rest):
                body = _found(r"body=%?([\w.\-]+)", operation.rest)
                yield from self.operations(body, times * self._trip_count(operation.rest))
            elif re.search(r"\b(conditional|call)\(", operation.rest):
                for called in _called(operation.rest):
                    yield from self.operations(called, times)
            else:
                yield operation

    def fused(self, operation: Operation) -> Iterator[Operation]:
        """What a fusion is made of; nothing for any other operation."""
        for called in re.findall(r"\bfusion\(.*calls=%([\w.\-]+)", operation.rest):
            yield from self._lines(called, operation.times)

    def multiplies_matrices(self, operation: Operation) -> bool:
        """Whether an operation is a product of matrices, alone or fused with others."""
        # What a TPU's compiler makes of every `dot`.
        product = r"\bconvolution\("
        return any(re.search(product, x.rest) for x in (operation, *self.fused(operation)))

    def hbm_bytes(self, operation: Operation) -> int:
        """Bytes of an operation's results and operands that live in HBM."""
        called = re.match(r"(\(.*?\)|\S+) [\w\-]+\(([^)]*)\)", operation.rest)
        if not called:
            return 0
        results, operands = called.groups()
        shapes = self.shapes(operation.computation)
        return hbm_bytes(results) + sum(
            hbm_bytes(shapes.get(operand, "")) for operand in re.findall(r"%([\w.\-]+)", operands)
        )

    def shapes(self, computation: str) -> dict[str, str]:
        """The shape of every result in a computation, by name."""
        if computation not in self._shapes:
            pattern = r"\s*(?:ROOT )?%([\w.\-]+) = (\([^=]*?\)|\S+) "
            matches = (re.match(pattern, line) for line in self._computations[computation])
            self._shapes[computation] = {m[1]: m[2] for m in matches if m}
        return self._shapes[computation]

    def _lines(self, computation: str, times: int) -> Iterator[Operation]:
        for line in self._computations.get(computation, ()):
            match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*)$", line)
            if match:
                yield Operation(computation, match[1], match[2], times)

    def _trip_count(self, rest: str) -> int:
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
        if known:
            return int(known.group(1))
        bound = self._loop_bound(_found(r"condition=%?([\w.\-]+)", rest))
        if not bound:
            self.unknown_loops += 1
        return bound or 1

    def _loop_bound(self, condition: str) -> int:
        """The largest constant that a loop's condition compares with."""
        found, left = [0], [condition]
        while left:
            for line in self._computations.get(left.pop(), ()):
                found += map(int, re.findall(r"s32\[\]\S* constant\((\d+)\)", line))
                left += re.findall(r"calls=%?([\w.\-]+)", line)
        return max(found)


def array_shapes(text: str) -> list[tuple[tuple[int, ...], int, str]]:
    """Dimensions, bytes and layout of every array in a line of HLO."""
    found = []
    for kind, dims, layout in re.findall(
        r"\b(pred|[suf]\d+|bf16|f8\w*)\[([\d,]*)\](?:\{([^}]*)\})?", text
    ):
        width = {"pred": 1, "bf16": 2}.get(kind)
        if width is None:
            width = 1 if kind.startswith("f8") else int(re.sub(r"\D", "", kind)) // 8 or 1
        shape = tuple(int(d) for d in dims.split(",") if d)
        found.append((shape, math.prod(shape) * width, layout))
    return found


def hbm_bytes(text: str) -> int:
    """Bytes of the arrays in a line of HLO, without those that live in vector or scalar memory."""
    arrays = array_shapes(text)
    return sum(
        size for _, size, layout in arrays if layout and not re.search(r"S\([1-9]\)", layout)
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"{pattern} is not in {text}"
    return match.group(1)


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines = None
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            lines = found[head.group(2)] = []
            if head.group(1):
                found["ENTRY"] = lines
        elif line.rstrip() == "}":
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def _called(rest: str) -> Iterator[str]:
    yield from re.findall(r"(?:to_apply|true_computation|false_computation)=%?([\w.\-]+)", rest)
    branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
    if branches:
        yield from re.findall(r"%([\w.\-]+)", branches.group(1))
