"""One run in two processes of one machine: killed, begun again, and as a whole one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp
from trained import load_trained

SCRIPT = Path(__file__).with_name("small_train_lm.py")
OPTIONS = (
    "--mixer simple_gla --implementation reference --steps 12 --batch-size 4 --sequence-length 16 "
    "--held-out-bytes 64 --sample-bytes 2 --checkpoint-every 4 --log-every 4 --distributed "
    "--mesh fsdp=2"
)


def start(run_dir):
    """Both processes, of one device each: of every matrix, each holds a half."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=1",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(run_dir.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, *OPTIONS.split(), "--run-dir", run_dir],
            env=environment | {"JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]


def finish(run_dir):
    """What the processes print."""
    processes = start(run_dir)
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in outputs]


def saved(run_dir):
    """The parameters' bytes, and the checksums of all that is saved."""
    model, step = load_trained(run_dir)
    path = run_dir / "checkpoints" / str(step)
    metadata = ocp.metadata(path, checkpointable_name="model").custom_metadata
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(model))], metadata


@pytest.mark.slow
def test_two_processes_killed_end_as_whole_ones(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    outputs = finish(whole)
    assert json.loads(outputs[0].splitlines()[-1])["final_step"] == 12
    assert "final_step" not in outputs[1]

    first, second = start(killed)
    while not (killed / "checkpoints" / "4").exists() and first.poll() is None:
        time.sleep(0.001)
    second.kill()
    first.communicate(timeout=120)
    second.communicate()
    assert first.returncode != 0
    assert second.returncode == -signal.SIGKILL
    assert not (killed / "result.json").exists()

    finish(killed)
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 13)]
    assert saved(killed) == saved(whole)
