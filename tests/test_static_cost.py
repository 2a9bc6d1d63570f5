"""What the compiler's schedules say of a program with kernels, loops and plain operations."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import results
from benchmarks.hlo import Operation
from benchmarks.tpu_compiler import TARGETS
from benchmarks.transfers import Transfers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux alone")

PROGRAM = """
import json
import jax.numpy as jnp
from benchmarks.op_cases import Case
from benchmarks.static_cost import static_cost

def cost(length):
    case = Case("simple_gla", key_heads=2, value_heads=2, length=length)
    arguments = case.arguments()
    backward = case.forward_and_backward("pallas_tpu")
    found = static_cost("v6e", backward, arguments, arguments["v"])
    kernels = {kernel.name.split(".")[0]: kernel.cycles for kernel in found.kernels}
    return {"kernels": kernels, "xla": found.xla_cycles, "loops": found.unknown_loops}

print(json.dumps([cost(8192), cost(32768)]))
"""


@pytest.mark.slow
def test_kernels_are_counted_and_grow_with_the_tokens():
    # The compiler writes schedules only if it is told so before it is first used.
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    short, long = json.loads(run.stdout.splitlines()[-1])
    assert short["kernels"].keys() == {"simple_gla_forward", "simple_gla_backward"}
    for name, cycles in short["kernels"].items():
        assert 1e4 < cycles < 2e5
        assert 3 < long["kernels"][name] / cycles < 4.2
    assert long["xla"] > short["xla"] > 0
    assert long["loops"] == short["loops"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "where"),
    [
        ("ops", ["case=SimpleGLA", "implementation=pallas_tpu", "target=v6e"]),
        ("ops", ["case=GDN", "implementation=pallas_tpu", "target=v5p"]),
        ("ops", ["case=KDA", "implementation=pallas_tpu", "target=v5p"]),
        ("layers", ["layer=SimpleGLA", "length=8192", "documents=25", "target=v6e"]),
        ("decoding", ["batch=1", "mixer=gated_deltanet", "target=v6e"]),
        ("accuracy", ["op=gdn", "implementation=xla", "length=300"]),
        ("memory", ["layer=SimpleGLA block"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_no_figure_falls_behind_what_is_kept(table, where):
    command = [sys.executable, "-m", "benchmarks.results", "--tables", table, "--where", *where]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_schedules_are_not_written_where_nothing_is_counted():
    """They double the time of every other test that compiles for a TPU."""
    assert "dump" not in os.environ.get("LIBTPU_INIT_ARGS", "")


@pytest.mark.parametrize(("moved", "waits"), [(0, 0.5), (1 << 20, 0.75), (1 << 30, 1)])
def test_a_copy_is_waited_for_as_far_as_what_runs_beside_it_leaves_no_time(moved, waits):
    shape = "f32[1024,1024]{1,0:T(8,128)S(1)}"
    start = Operation("ENTRY", "start", f"({shape}, {shape}, u32[]) copy-start(%x)", 1)
    beside = Operation("ENTRY", "beside", f"{shape} fusion(%y)", 1)
    done = Operation("ENTRY", "done", f"{shape} copy-done(%start)", 1)
    copy = TARGETS["v6e"].memory_cycles(4 << 20)
    transfers = Transfers(TARGETS["v6e"])
    transfers.run(start, 0, 0)
    transfers.run(beside, copy / 2, moved)
    transfers.run(done, 0, 0)
    assert transfers.waiting_cycles == pytest.approx(waits * copy)


def test_what_falls_behind_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    row = results.make_row({"case": "a", "target": "v6e"}, {"forward": 1.0, "backward": 0.01})
    other = results.make_row({"case": "b", "target": "v6e"}, {"forward": 3.0})
    results.save("ops", [row, other])
    results.save("ops", [row | {"figures": {"forward": 2.0, "backward": 0.01}}])
    kept = results.load("ops")
    assert [x["figures"]["forward"] for x in kept] == [2.0, 3.0]
    assert results.grown(kept[0]["figures"], {"forward": 2.1, "backward": 0.02}) == {}
    worse = results.grown(kept[0]["figures"], {"forward": 2.3, "backward": 0.01})
    assert worse == {"forward": (2.0, 2.3)}
    assert results.grown({"error": 1e-6}, {"error": 3e-6}, smallest=1e-6)
    assert results.grown({"error": 1e-6}, {"error": float("nan")}, smallest=1e-6)
