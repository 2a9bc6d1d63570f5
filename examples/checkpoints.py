"""Checkpoints of a run: model, optimizer and place in the data, whole or not at all."""

import contextlib
import dataclasses
import json
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import grain
import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp
from processes import is_first

policies = ocp.training.preservation_policies


@dataclasses.dataclass(frozen=True)
class Training[Model: nnx.Module]:
    """What a run updates, saves and restores together."""

    model: Model
    optimizer: nnx.Optimizer
    data: grain.DatasetIterator


class NotSaved(Exception):
    """A checkpoint could not be written."""


class NotReadable(ValueError):
    """There are checkpoints, and none can be read."""


class Checkpoints:
    """The newest checkpoints of a run and its best one, written in the background.

    A process that is killed while it writes leaves the checkpoints before it untouched, as does a
    full disk. Use it as a context manager: leaving waits for the last write.
    """

    def __init__(self, directory: Path, *, keep: int = 2):
        """Open a directory, which need not exist.

        Checkpoints whose damage would hide the others are moved aside and reported.

        Args:
            directory: one subdirectory per step.
            keep: how many of the newest stay.

        Raises:
            NotReadable: there are checkpoints, and all are damaged so.
        """
        self._directory = directory.resolve()
        unlistable = _unlistable(self._directory)
        if len(unlistable) == len(_steps(self._directory)):
            self._check_any_readable(unlistable)
        _move_aside(self._directory, unlistable)
        self._checkpointer = ocp.training.Checkpointer(
            self._directory,
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(keep), _best_checkpoint]
            ),
            cleanup_tmp_directories=True,
        )
        self._write: tuple[int, Any] | None = None
        self._failed = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._wait()
        finally:
            # A write that has failed, which is told, fails again here.
            with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
                self._checkpointer.close()

    def save(self, step: int, training: Training, held_out: float | None = None) -> None:
        """Save what a run is after `step`.

        Args:
            step: of the run.
            training: what it is.
            held_out: bits per byte by which the best checkpoint is found.

        Raises:
            NotSaved: the checkpoint before could not be written.
        """
        self._wait()
        arrays, place = _arrays(training), training.data.get_state()
        parts = arrays | {"data": place}
        response = self._checkpointer.save_checkpointables_async(
            step,
            arrays,
            # The place in the data is the same in every process, and for any number of them.
            custom_metadata={
                "data": place,
                "checksums": {name: _checksum(part) for name, part in parts.items()},
            },
            metrics=None if held_out is None else {"eval_bits_per_byte": held_out},
            force=True,
        )
        self._write = step, response

    def _wait(self) -> None:
        if self._write is None:
            return
        (step, response), self._write = self._write, None
        try:
            response.result()
        except Exception as error:  # whatever the writers raise
            self._failed = True
            raise NotSaved(
                f"the checkpoint of step {step} could not be written to {self._directory} (those "
                f"before it are as they were): {_root_cause(error)}"
            ) from error

    def restore(self, training: Training) -> int:
        """Bring a run to the newest checkpoint that can be read.

        Newer ones, which cannot, are moved aside and reported.

        Returns:
            The checkpoint's step; 0 without any checkpoint.

        Raises:
            NotReadable: there are checkpoints, and none can be read.
        """
        unreadable: dict[int, str] = {}
        for checkpoint in reversed(self._checkpointer.checkpoints):
            try:
                loaded = self._load(checkpoint.step, training)
            except Exception as error:  # whatever a damaged file makes the readers raise
                unreadable[checkpoint.step] = _root_cause(error)
                continue
            _move_aside(self._directory, unreadable)
            if unreadable:
                self._checkpointer.reload()
            nnx.update(training.model, loaded["model"])
            nnx.update(training.optimizer, loaded["optimizer"])
            training.data.set_state(loaded["data"])
            return checkpoint.step
        self._check_any_readable(unreadable)
        return 0

    def _check_any_readable(self, unreadable: Mapping[int, str]) -> None:
        """Check that what cannot be read, which is all there is, is nothing."""
        if unreadable:
            newest = max(unreadable)
            raise NotReadable(
                f"run_dir must hold a checkpoint that can be read, but none of steps "
                f"{sorted(unreadable)} in {self._directory} can; step {newest}: "
                f"{unreadable[newest]}"
            )

    def _load(self, step: int, training: Training) -> dict[str, Any]:
        loaded = self._checkpointer.load_checkpointables(step, _arrays(training))
        loaded["data"] = _metadata(self._directory / str(step))["data"]
        _check_numbers(loaded, self._directory / str(step))
        return loaded


_best_checkpoint = policies.BestN(
    get_metric_fn=lambda metrics: metrics["eval_bits_per_byte"],
    reverse=True,
    n=1,
    keep_checkpoints_without_metrics=False,
)


def load_model(directory: Path, model: nnx.Module) -> int:
    """Give a model the parameters of the newest checkpoint that can be read.

    Newer ones, which cannot, are reported. The directory stays as it is.

    Returns:
        The checkpoint's step.

    Raises:
        ValueError: there is no checkpoint, or none can be read.
    """
    steps = _steps(directory)
    if not steps:
        raise ValueError(f"a checkpoint is needed, but {directory} holds none")
    unreadable: dict[Path, str] = {}
    for step in sorted(steps, reverse=True):
        path = directory.resolve() / str(step)
        try:
            loaded = ocp.load_checkpointables(path, {"model": nnx.state(model)})
            _check_numbers(loaded, path)
        except Exception as error:  # whatever a damaged file makes the readers raise
            unreadable[path] = _root_cause(error)
            continue
        for newer, reason in unreadable.items():
            print(f"{newer} cannot be read ({reason}); step {step} is taken", file=sys.stderr)
        nnx.update(model, loaded["model"])
        return step
    newest, reason = next(iter(unreadable.items()))
    raise ValueError(f"a checkpoint that can be read is needed, but {newest} cannot: {reason}")


def _steps(directory: Path) -> list[int]:
    return [int(p.name) for p in directory.glob("*") if p.is_dir() and p.name.isdigit()]


def _unlistable(directory: Path) -> dict[int, str]:
    """Steps with a file that is no JSON object, for which orbax would list no checkpoint at all."""
    found = {}
    for step in _steps(directory):
        for file in ("_CHECKPOINT_METADATA", "metrics/metrics"):
            path = directory / str(step) / file
            try:
                if path.exists() and not isinstance(json.loads(path.read_bytes()), dict):
                    found[step] = f"{file} is no JSON object"
            except ValueError:
                found[step] = f"{file} is no JSON"
    return found


def _move_aside(directory: Path, unreadable: Mapping[int, str]) -> None:
    # Every process has found them before the first one moves them.
    multihost_utils.sync_global_devices("found unreadable")
    for step, reason in unreadable.items() if is_first() else ():
        target = directory.with_name("unreadable") / f"{step}-{time.time_ns()}"
        target.parent.mkdir(exist_ok=True)
        (directory / str(step)).rename(target)
        print(
            f"checkpoint of step {step} cannot be read ({reason}); it is moved to {target}",
            file=sys.stderr,
        )
    multihost_utils.sync_global_devices("moved aside")


def _arrays(training: Training) -> dict[str, nnx.State]:
    return {"model": nnx.state(training.model), "optimizer": nnx.state(training.optimizer)}


def _metadata(checkpoint: Path) -> Mapping[str, Any]:
    metadata = ocp.metadata(checkpoint, checkpointable_name="model").custom_metadata or {}
    missing = {"checksums", "data"} - metadata.keys()
    if missing:
        raise ValueError(f"the metadata saved with it hold no {' and no '.join(sorted(missing))}")
    return metadata


def _check_numbers(parts: Mapping[str, Any], checkpoint: Path) -> None:
    checksums = _metadata(checkpoint)["checksums"]
    for name, part in parts.items():
        if _checksum(part) != checksums[name]:
            raise ValueError(f"the numbers of {name} are not those that were saved")


def _checksum(tree: Any) -> int:
    """CRC-32 of all the numbers, as the array files (tensorstore 0.1.86) do not notice a change."""
    checksum = 0
    for leaf in jax.tree.leaves(tree):
        checksum = zlib.crc32(_on_host(leaf).tobytes(), checksum)
    return checksum


def _on_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
