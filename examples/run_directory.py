"""A run's directory: what was asked, the outcome, and whether a new call is the same run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


class RunDirectory:
    """Where a run keeps its config, checkpoints and records, and at the end its result."""

    def __init__(self, path: Path, config: Record, *, may_change: frozenset[str]):
        """See whether a run may begin here, or go on. Nothing is written before `claim`.

        Args:
            path: the directory.
            config: what the run depends on, of JSON types. It may change as long as nothing is
                saved.
            may_change: fields of `config` that may differ when a run goes on.

        Raises:
            ValueError: the directory is none, or holds something else, or a run with another
                config.
        """
        self.path = path
        self.config = config
        before = _read(path / "run.json")
        if before is None:
            _check_empty(path)
        elif _has_begun(path) or before.keys() != config.keys():
            _check_same(path, before, config, may_change)

    def claim(self) -> None:
        """Make the directory if there is none, and record the config.

        Raises:
            ValueError: the directory cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if _read(self.path / "run.json") != self.config:
                write_json(self.path / "run.json", self.config)
        except OSError as error:
            raise ValueError(f"run_dir {self.path} cannot be written: {error.strerror}") from error

    @property
    def result(self) -> dict[str, Any] | None:
        """What the finished run reported; None while it is unfinished."""
        return _read(self.path / "result.json")

    def finish(self, result: Record) -> None:
        """Record the outcome: the run is then finished."""
        write_json(self.path / "result.json", result)


def read_config(path: Path) -> dict[str, Any]:
    """What the run in a directory was begun with.

    Raises:
        ValueError: there is no run, or no run of a model.
    """
    config = _read(path / "run.json")
    if config is None:
        raise ValueError(f"a run is needed, but {path} holds none: it has no run.json")
    if "model" not in config:
        raise ValueError(f"a run of a model is needed, but {path / 'run.json'} tells of none")
    return config


def write_json(path: Path, record: Record) -> None:
    """Write a file that is, whenever the process is killed, the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(temporary, path)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"run_dir must hold a run, but {path} is no JSON object")
    return record


def _has_begun(path: Path) -> bool:
    """Whether anything is saved that another config would contradict."""
    checkpoints = path / "checkpoints"
    return checkpoints.is_dir() and any(entry.name.isdigit() for entry in checkpoints.iterdir())


def _check_empty(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"run_dir must be a directory, but {path} is a file")
    found = sorted(entry.name for entry in path.iterdir() if entry.suffix != ".tmp")
    if found:
        raise ValueError(
            f"run_dir must be new, empty or an earlier run, but {path} has no run.json and "
            f"holds {', '.join(found[:5])}"
        )


def _check_same(path: Path, before: Record, now: Record, may_change: frozenset[str]) -> None:
    changed = [
        f"{name} was {before.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if name not in may_change and before.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"run_dir {path} holds a run with another config: {'; '.join(changed)}; give the "
            "old values to go on with it, or another run_dir to begin anew"
        )
