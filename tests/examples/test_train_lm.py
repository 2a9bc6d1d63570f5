"""The training script as a user meets it: kills, signals, restarts, and wrong commands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import train_lm
from orbax.checkpoint import v1 as ocp

from gla_layers import language_model_config
from tests.examples import small_train_lm

SCRIPT = Path(__file__).with_name("small_train_lm.py")
STEPS = 80
COMMAND = (
    f"--mixer simple_gla attention --implementation reference --steps {STEPS} --batch-size 2 "
    "--sequence-length 16 --accumulate 2 --remat --held-out-bytes 512 --sample-bytes 8 "
    "--log-every 3 --checkpoint-every 5 --eval-every 20"
).split()


def start(run_dir):
    """The script in a process of its own, its programs compiled once for all processes."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(run_dir.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, SCRIPT, *COMMAND, "--run-dir", run_dir],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop(run_dir, number, condition):
    """Start the script, send it a signal as soon as the condition holds, and return the rest."""
    process = start(run_dir)
    while not condition() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode != 0, f"finished before it was stopped: {output}"
    return process.returncode, output, errors


def finish(run_dir):
    process = start(run_dir)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def metrics(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def without_speed(lines):
    rows = [json.loads(line) for line in lines]
    return [{key: row[key] for key in row if key != "tokens_per_second"} for row in rows]


def final_arrays(run_dir):
    path = run_dir / "checkpoints" / str(STEPS)
    parts = {name: ocp.load(path, checkpointable_name=name) for name in ("model", "optimizer")}
    leaves = jax.tree.leaves_with_path(parts)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # by final_arrays, knowingly
def test_stopped_runs_end_as_a_whole_one(tmp_path, monkeypatch, capsys):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    finish(whole)

    stop(stopped, signal.SIGKILL, (stopped / "checkpoints" / "10").exists)
    code, output, errors = stop(stopped, signal.SIGTERM, (stopped / "checkpoints" / "30").exists)
    assert code == 128 + signal.SIGTERM, errors
    assert "going on from step" in errors
    assert f"stopped by SIGTERM; step {len(metrics(stopped))} is saved" in output
    being_saved = "checkpoints/*.orbax-checkpoint-tmp"
    assert not list(stopped.glob(being_saved))
    stop(stopped, signal.SIGKILL, lambda: any(stopped.glob(being_saved)))
    output = finish(stopped)

    for directory in (whole, stopped):
        assert [json.loads(line)["step"] for line in metrics(directory)] == [*range(1, STEPS + 1)]
    assert without_speed(metrics(stopped)) == without_speed(metrics(whole))
    arrays, expected = final_arrays(stopped), final_arrays(whole)
    assert arrays.keys() == expected.keys()
    assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)

    result = json.loads(output.splitlines()[-1])
    assert result["final_step"] == STEPS
    assert 0 < result["eval_bits_per_byte"] < 8
    assert result["tokens_per_second"] > 0
    assert (stopped / "loss.png").exists()

    monkeypatch.setattr(language_model_config, "PRESETS", small_train_lm.PRESETS)
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *COMMAND, "--run-dir", str(stopped)])
    train_lm.main()
    again = capsys.readouterr().out
    assert "holds a finished run" in again
    assert again.splitlines()[-1] == output.splitlines()[-1]

    for lost in ("result.json", "metrics.jsonl"):
        (stopped / lost).unlink()
    train_lm.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {name: x for name, x in result.items() if name != "tokens_per_second"}

    changed = ["--run-dir", stopped, "--learning-rate", "0.1", "--log-every", "7"]
    code, error = fail(monkeypatch, capsys, *COMMAND, *changed)
    assert code == 1
    assert "learning_rate was 0.005 and is now 0.1; give the old values" in error


@pytest.mark.slow
def test_interpreted_tpu_kernels_train_as_plain_jax(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model_config, "PRESETS", small_train_lm.PRESETS)
    losses = {}
    for implementation in ("xla", "pallas_tpu"):
        run_dir = tmp_path / implementation
        command = (
            f"--mixer simple_gla --implementation {implementation} --steps 4 --warmup 0 "
            f"--batch-size 2 --sequence-length 150 --held-out-bytes 512 --sample-bytes 1 "
            f"--run-dir {run_dir}"
        )
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *command.split()])
        train_lm.main()
        losses[implementation] = [json.loads(line)["bits_per_byte"] for line in metrics(run_dir)]
    assert losses["xla"][-1] < losses["xla"][0] - 0.01
    np.testing.assert_allclose(losses["pallas_tpu"], losses["xla"], atol=1e-4)


def fail(monkeypatch, capsys, *arguments):
    """Run the script in this process to its end by an error; the exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        train_lm.main()
    code = caught.value.code
    return (1, code) if isinstance(code, str) else (code, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("--preset tinny", ["--preset", "tinny", "tiny"]),
        ("--mixer mamba", ["--mixer", "mamba", "gated_deltanet"]),
        ("--mixer kda mamba", ["--mixer", "mamba"]),
        ("--implementation cuda", ["--implementation", "cuda", "pallas_tpu"]),
        ("--dtype float8", ["--dtype", "float8", "bfloat16"]),
        ("--stepz 5", ["--stepz", "--steps"]),
        ("--steps many", ["--steps", "many"]),
        ("--steps 0", ["steps must be at least 1, got 0"]),
        ("--batch-size -1", ["batch_size must be at least 1, got -1"]),
        ("--keep-checkpoints 0", ["keep_checkpoints must be at least 1, got 0"]),
        ("--learning-rate nan", ["learning_rate must be a number above 0, got nan"]),
        ("--clip-norm inf", ["clip_norm must be a number above 0, got inf"]),
        ("--warmup 1.5", ["warmup must be at least 0 and below 1, got 1.5"]),
        ("--weight-decay -0.1", ["weight_decay must be at least 0 and below 1, got -0.1"]),
        ("--seed -1", ["seed must be from 0 to 2**32 - 1, got -1"]),
        ("--mesh fsdp=3", ["mesh must be sizes of data, fsdp, sequence, tensor", "got fsdp=3"]),
        ("--mesh fsdp=8 --batch-size 4", ["batch_size must be a multiple of 8 on this mesh"]),
        ("--mesh sequence=8 --sequence-length 20", ["sequence_length must be a multiple of 8"]),
        ("--mesh tensor=8", ["num_heads must be a multiple of 8", "got 2"]),
        ("--mixer kda kda kda kda kda", ["mixers must hold from 1 to num_layers = 4 names"]),
        ("--held-out-bytes 9999999", ["held_out_bytes must be from 1 to half of the text's"]),
        ("--text {tmp}/none.txt", ["text must name files", "none.txt' matches none"]),
        ("--text {tmp}/empty.txt", ["text must not be empty, but", "empty.txt holds nothing"]),
        ("--text {tmp}/bad.jsonl", ["bad.jsonl must have an object", "line 2 is 'oops'"]),
        ("--run-dir {tmp}/empty.txt", ["run_dir must be a directory", "empty.txt is a file"]),
        ("--run-dir {tmp}/empty.txt/run", ["run_dir", "cannot be written: Not a directory"]),
        ("--run-dir {tmp}", ["run_dir must be new, empty or an earlier run", "bad.jsonl"]),
    ],
)
def test_wrong_commands_end_with_a_sentence(arguments, messages, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\noops\n')
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    code, error = fail(monkeypatch, capsys, *arguments.format(tmp=tmp_path).split())
    assert code in (1, 2)
    assert all(message in " ".join(error.split()) for message in messages), error
    assert "Traceback" not in error
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
