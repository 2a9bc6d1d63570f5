"""Stop at the end of a step when told to, rather than in the middle of one."""

import signal
from types import FrameType, TracebackType

import numpy as np
from jax.experimental import multihost_utils


class Interrupts:
    """Catches SIGTERM and Ctrl-C while it is entered, and remembers which came.

    A second Ctrl-C acts at once, as ever.

    Attributes:
        received: the signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> "Interrupts":
        self._previous = {
            number: signal.signal(number, self._catch) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any process has received a signal, which then counts for all; all must ask."""
        received = int(np.max(multihost_utils.process_allgather(np.int32(self.received or 0))))
        if received:
            self.received = signal.Signals(received)
        return bool(received)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
