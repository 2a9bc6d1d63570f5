"""Checkpoints of a run: model, optimizer and place in the data, whole or not at all."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import grain
from flax import nnx
from orbax.checkpoint import v1 as ocp


class Checkpoints:
    """The newest checkpoints of a run, written in the background.

    A process that is killed while it writes leaves the checkpoints before it untouched. Use it
    as a context manager: leaving waits for the last write.
    """

    def __init__(self, directory: Path, *, keep: int = 2):
        """Open a directory, which need not exist.

        Args:
            directory: one subdirectory per step.
            keep: how many checkpoints stay.
        """
        self._directory = directory.resolve()
        self._checkpointer = ocp.training.Checkpointer(
            self._directory,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._last_saved: int | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._checkpointer.close()

    def save(
        self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, data: grain.DatasetIterator
    ) -> None:
        """Save what the run is after `step`, unless that is saved already."""
        if step == self._last_saved:
            return
        self._checkpointer.save_checkpointables_async(
            step, _checkpointables(model, optimizer, data), force=True
        )
        self._last_saved = step

    def restore(
        self, model: nnx.Module, optimizer: nnx.Optimizer, data: grain.DatasetIterator
    ) -> int:
        """Bring the three to the newest checkpoint that can be read.

        Newer ones, which cannot, are moved aside and reported.

        Returns:
            The checkpoint's step; 0 without any checkpoint.

        Raises:
            ValueError: there are checkpoints, and none can be read.
        """
        unreadable: dict[int, str] = {}
        for checkpoint in reversed(self._checkpointer.checkpoints):
            try:
                loaded = self._load(checkpoint.step, model, optimizer, data)
            except Exception as error:  # whatever a damaged file makes the readers raise
                unreadable[checkpoint.step] = _first_line(error)
                continue
            self._move_aside(unreadable, checkpoint.step)
            nnx.update(model, loaded["model"])
            nnx.update(optimizer, loaded["optimizer"])
            self._last_saved = checkpoint.step
            return checkpoint.step
        if unreadable:
            step, reason = next(iter(unreadable.items()))
            raise ValueError(
                f"run_dir must hold a checkpoint that can be read, but none of steps "
                f"{sorted(unreadable)} in {self._directory} can; step {step}: {reason}"
            )
        return 0

    def _load(self, step, model, optimizer, data) -> Mapping[str, Any]:
        return self._checkpointer.load_checkpointables(
            step, _checkpointables(model, optimizer, data)
        )

    def _move_aside(self, unreadable: Mapping[int, str], good: int) -> None:
        for step, reason in unreadable.items():
            target = self._directory.with_name("unreadable") / str(step)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            (self._directory / str(step)).rename(target)
            print(
                f"checkpoint of step {step} cannot be read ({reason}); it is moved to {target}, "
                f"and the run goes on from step {good}",
                file=sys.stderr,
            )
        if unreadable:
            self._checkpointer.reload()


def _checkpointables(model, optimizer, data) -> dict[str, Any]:
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer), "data": data}


def _first_line(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if str(error)
        else type(error).__name__
    )
