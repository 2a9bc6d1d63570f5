"""What the compiler's schedules say of a program with kernels, loops and plain operations."""

import json
import subprocess
import sys

import pytest

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
@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux alone")
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
