"""What steps gave, as rows of metrics, and notes of those that were odd."""

import collections
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from metrics import Row
from tqdm import tqdm

SPIKE = 1.3
"""A loss is a spike if it is so many times the median of the `RECENT` before it."""

RECENT = 50
PATIENCE = 10
"""Steps in a row that may be skipped before the run is given up."""


class Diverged(Exception):
    """The gradients are no numbers any more."""


class StepLog:
    """Turns the outcomes of steps, which the device may still be at work on, into rows.

    The device is waited for when rows are asked for, not each step. A step of which a batch's loss
    or gradient is no number has no `bits_per_byte` or no `gradient_norm`, and counts its
    `skipped_batches`.
    """

    def __init__(self, peak_tokens_per_second: float | None = None):
        """Begin.

        Args:
            peak_tokens_per_second: what the devices could do at most, for `mfu`; without it rows
                have none.
        """
        self._peak = peak_tokens_per_second
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._skipped_in_a_row = 0
        self.restart()

    def restart(self) -> None:
        """Begin to measure the time of the steps to come."""
        self._outcomes: dict[int, list[Mapping[str, jax.Array]]] = {}
        self._num_tokens = 0
        self._began = time.perf_counter()

    def add(self, step: int, outcome: Mapping[str, jax.Array], num_tokens: int) -> None:
        """Note one batch's `loss` in nats and `gradient_norm`; a step may have several."""
        self._outcomes.setdefault(step, []).append(outcome)
        self._num_tokens += num_tokens

    def rows(self) -> list[Row]:
        """Wait for the steps since `restart`; a row of metrics for each.

        Raises:
            Diverged: none of the last `PATIENCE` steps had a gradient.
        """
        rows = [_row(step, outcomes) for step, outcomes in self._outcomes.items()]
        speed = self._num_tokens / (time.perf_counter() - self._began)
        for row in rows:
            row["tokens_per_second"] = speed
            if self._peak is not None:
                row["mfu"] = speed / self._peak
            self._look_at(row)
        return rows

    def _look_at(self, row: Row) -> None:
        bits = row.get("bits_per_byte")
        if "skipped_batches" in row:
            _note(f"step {row['step']}: {row['skipped_batches']} batches without a finite gradient")
        if bits is not None:
            if len(self._recent) == RECENT and bits > SPIKE * statistics.median(self._recent):
                usual = statistics.median(self._recent)
                _note(f"step {row['step']}: {bits:.3f} bits per byte, after {usual:.3f} usually")
            self._recent.append(bits)
        self._skipped_in_a_row = 0 if "gradient_norm" in row else self._skipped_in_a_row + 1
        if self._skipped_in_a_row == PATIENCE:
            raise Diverged(
                f"none of the {PATIENCE} steps up to {row['step']} had a finite gradient; try a "
                "lower learning_rate"
            )


def _row(step: int, outcomes: Sequence[Mapping[str, jax.Array]]) -> Row:
    losses, norms = (np.array([x[name] for x in outcomes]) for name in ("loss", "gradient_norm"))
    row: Row = {"step": step}
    if math.isfinite(losses.mean()):
        row["bits_per_byte"] = float(losses.mean()) / math.log(2)
    if np.isfinite(norms).any():
        row["gradient_norm"] = float(norms[np.isfinite(norms)].mean())
    if not np.isfinite(norms).all():
        row["skipped_batches"] = int(np.sum(~np.isfinite(norms)))
    return row


def _note(text: str) -> None:
    """Print beside the progress bar."""
    tqdm.write(text, file=sys.stderr)
