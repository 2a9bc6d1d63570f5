"""A run in several processes: who takes part, and which of them writes."""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

SECONDS_UNTIL_DEAD = 30
"""Silence after which a process counts as dead, and the others end."""


def join() -> None:
    """Find the other processes; call it before any computation. Only the first then prints.

    TPU pods, Slurm, Open MPI and Kubernetes tell JAX what it must know. Elsewhere the environment
    does: `JAX_COORDINATOR_ADDRESS`, host and port of the first process, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`, from 0.

    Raises:
        ValueError: nobody tells.
    """
    # Its handler would keep SIGTERM from ending a process that is not training yet.
    jax.config.update("jax_enable_preemption_service", False)
    count, number = _whole_number("JAX_NUM_PROCESSES"), _whole_number("JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(
            num_processes=count,
            process_id=number,
            heartbeat_timeout_seconds=SECONDS_UNTIL_DEAD,
            shutdown_timeout_seconds=SECONDS_UNTIL_DEAD,
        )
    except ValueError as error:
        raise ValueError(
            "distributed needs a cluster that JAX knows, or JAX_COORDINATOR_ADDRESS, "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment: {error}"
        ) from error
    if not is_first():
        sys.stdout = io.StringIO()


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def first_alone(function: Callable[[], None]) -> None:
    """Call a function in the first process, when all have come here."""
    multihost_utils.sync_global_devices("first_alone")
    if is_first():
        function()


@contextlib.contextmanager
def own_directory(path: Path) -> Iterator[Path]:
    """Where this process keeps records: in the path, or, if it is not the first, in no place."""
    if is_first():
        yield path
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)


def _whole_number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return None if text is None else int(text)
