"""What a program waits for: copies between memories that run beside its operations.

The compiler brings operands into vector memory ahead of their use. The copies follow one another
at the memory's bandwidth, as far as the operation that runs meanwhile does not take it:

    operation   takes its own cycles c, of which moving its own bytes leaves c - bytes / bandwidth
                for the copies that have started
    copy-done   takes what is left of its copy, and of those that started before

XLA's estimates have no part of this: an operand in vector memory costs them nothing.
"""

import re

from .hlo import Operation, array_shapes
from .tpu_compiler import Target


class Transfers:
    """The copies under way, as the operations of a program go by in their order.

    Attributes:
        waiting_cycles: for which nothing but copies has run.
    """

    def __init__(self, target: Target):
        self.waiting_cycles = 0.0
        self._target = target
        self._left: dict[str, float] = {}

    def run(self, operation: Operation, cycles: float, hbm_bytes: int) -> None:
        """Let an operation go by that takes so many cycles and moves so many bytes itself."""
        if re.search(r"\b(copy|slice)-start\(", operation.rest):
            copied = array_shapes(operation.rest)[1][1]
            self._left[operation.name] = self._target.memory_cycles(copied)
        elif done := re.search(r"\b(?:copy|slice)-done\(%([\w.\-]+)\)", operation.rest):
            self._wait_for(done.group(1))
        else:
            self._advance(max(0.0, cycles - self._target.memory_cycles(hbm_bytes)))

    def _wait_for(self, name: str) -> None:
        while name in self._left:
            first = next(iter(self._left))
            self.waiting_cycles += self._left.pop(first)

    def _advance(self, cycles: float) -> None:
        while cycles > 0 and self._left:
            first = next(iter(self._left))
            moved = min(cycles, self._left[first])
            cycles -= moved
            self._left[first] -= moved
            if not self._left[first]:
                del self._left[first]
