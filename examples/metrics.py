"""The record of a run: a line of JSON for every step, a plot, TensorBoard if asked."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

Row = dict[str, float]


class Metrics:
    """`metrics.jsonl`: a row for every step, in order and none twice.

    Use it as a context manager. What is written survives a kill of the process.
    """

    def __init__(self, path: Path, *, last_step: int, tensorboard: Path | None = None):
        """Open the record of a run that goes on after `last_step`.

        Args:
            path: the file. Rows after `last_step`, which will come again, are dropped.
            last_step: 0 for a run that begins.
            tensorboard: a directory for the same numbers in TensorBoard's form.
        """
        self._path = path
        _replace(path, [row for row in self.rows if row["step"] <= last_step])
        self._file = path.open("a")
        self._writer = None
        if tensorboard is not None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard), purge_step=last_step + 1)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    @property
    def rows(self) -> list[Row]:
        """All rows, read from the file, since a long run's are not kept in memory."""
        return _read(self._path)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows: `step`, and what was measured."""
        self._file.write(_lines(rows))
        self._file.flush()
        if self._writer is not None:
            for row in rows:
                for name, value in row.items():
                    if name != "step":
                        self._writer.add_scalar(name, value, row["step"])


def plot_loss(rows: Sequence[Row], path: Path) -> None:
    """Draw the training and held-out bits per byte over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label, style in (
        ("bits_per_byte", "training batch", "-"),
        ("eval_bits_per_byte", "held out", "o-"),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, linewidth=1, label=label)
            axes.legend()
    axes.set(xlabel="step", ylabel="bits per byte")
    figure.savefig(path, dpi=150)


def _read(path: Path) -> list[Row]:
    """The rows of a file whose last line a kill may have cut short."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError:
        rows = [None]
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise ValueError(
            f"{path} must hold an object of JSON with a step on every line; move it away to go on "
            "without the record of earlier steps"
        )
    return rows


def _replace(path: Path, rows: Iterable[Row]) -> None:
    """Write a file that is, whenever the process is killed, the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_lines(rows))
    os.replace(temporary, path)


def _lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
