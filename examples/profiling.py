"""A trace of a few steps for xprof: `uvx xprof --logdir runs/.../profile`."""

from pathlib import Path
from types import TracebackType

import jax


class Profiler:
    """Traces some steps of a run, from the third on: the first two compile.

    Use it as a context manager, so that a run that ends early leaves its trace whole.
    """

    def __init__(self, directory: Path, *, start: int, steps: int):
        """Plan the trace.

        Args:
            directory: where it is written.
            start: the step before the run's first.
            steps: how many to trace; 0 for none.
        """
        self._directory = directory
        self._steps = range(start + 3, start + 3 + steps)
        self._tracing = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Begin the trace if this is the first step of it."""
        if self._steps and step == self._steps[0]:
            jax.profiler.start_trace(self._directory)
            self._tracing = True

    def after(self, step: int, outcome: object) -> None:
        """End the trace if this was the last step of it, when its outcome is there."""
        if self._tracing and step == self._steps[-1]:
            jax.block_until_ready(outcome)
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
