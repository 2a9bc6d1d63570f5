"""Emission order: independent chains of dots, advanced one dot at a time.

One chunk of one head is a chain of dots, each waiting for the one before, and the TPU compiler
does not reorder far. So the kernels write a head's mathematics as a generator that yields after
each dot, and emit the heads' chains interleaved.
"""

from collections.abc import Generator, Iterable

Chain = Generator[None, None, None]


def lockstep(chains: Iterable[Chain], skew: int = 0) -> None:
    """Advance all chains in turn until each has ended; chain i starts i * skew turns late.

    A chain that reads what an earlier one writes must be skewed past that write.
    """
    for _ in interleaved(chains, skew):
        pass


def interleaved(chains: Iterable[Chain], skew: int = 0) -> Chain:
    """The chains as one, which yields after each of their turns; see `lockstep`."""
    waiting = [(i * skew, chain) for i, chain in enumerate(chains)]
    turn = 0
    while waiting:
        still = []
        for start, chain in waiting:
            if turn < start or next(chain, _ENDED) is not _ENDED:
                still.append((start, chain))
        waiting, turn = still, turn + 1
        yield


_ENDED = object()
