"""The Pallas kernels as programs for a TPU: they compile for every generation.

Interpret mode accepts much that a TPU refuses. libtpu compiles on any x86-64 Linux host.
"""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Jaxpr

from benchmarks.op_cases import Case
from benchmarks.tpu_compiler import TARGETS, compile_for
from tests.programs import equations

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux alone")

CASE_NAMES = {"gdn": "gated_delta_rule", "kda": "kda", "sgla": "simple_gla"}

every_op = pytest.mark.parametrize("op", CASE_NAMES.values())
every_target = pytest.mark.parametrize("target", TARGETS)


def small(op: str, **options) -> Case:
    return Case(op, **({"key_heads": 2, "value_heads": 2, "length": 300} | options))


def compile_case(target: str, case: Case) -> jax.stages.Compiled:
    """Forward and backward, with the block sizes that the generation gets by default."""
    arguments = case.arguments()
    return compile_for(target, case.forward_and_backward("pallas_tpu"), arguments, arguments["v"])


@every_target
@every_op
def test_compiles_for_every_generation(op, target):
    assert "tpu_custom_call" in compile_case(target, small(op)).as_text()


@pytest.mark.parametrize(
    "options",
    [
        {"length": 1},
        {"length": 131072},
        {"documents": 5},
        {"key_heads": 1, "value_heads": 3},
        {"head_size": 16},
        {"head_size": 100, "key_heads": 3, "value_heads": 3},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
@every_op
def test_compiles_for_every_shape(op, options):
    compile_case("v5e", small(op, **options))


# Heads of 128 in bfloat16 are `test_compiles_for_every_generation`.
EXTREMES = [(64, "bfloat16"), (256, "float32")]
SIZES_AND_TYPES = [*EXTREMES, (64, "float32"), (128, "float32"), (256, "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "head_size", "dtype"),
    [
        (target, *case)
        for target in TARGETS
        for case in (SIZES_AND_TYPES if target == "v5e" else EXTREMES)
    ],
)
@every_op
def test_compiles_for_every_head_size_and_type(op, target, head_size, dtype):
    compile_case(target, small(op, head_size=head_size, dtype=dtype))


# As many heads as a block ever holds, and grouped, or in as many rows: what takes the most memory.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("v4", {"key_heads": 8, "value_heads": 16, "dtype": "float32"}),
        ("v5e", {"key_heads": 8, "value_heads": 16, "dtype": "float32"}),
        ("v7x", {"key_heads": 8, "value_heads": 16, "dtype": "float32"}),
        ("v5e", {"batch": 32, "key_heads": 1, "value_heads": 1, "documents": 5}),
    ],
    ids=["v4", "v5e", "v7x", "rows"],
)
@every_op
def test_the_largest_blocks_compile(op, target, options):
    compile_case(target, Case(op, length=1000, **options))


@every_op
def test_none_means_pallas_on_a_tpu_and_xla_elsewhere(op):
    case = small(op)
    arguments = case.arguments()
    forward = case.forward(None)
    assert "tpu_custom_call" in compile_for("v5e", forward, arguments).as_text()
    assert "tpu_custom_call" not in jax.jit(forward).lower(arguments).as_text()


def test_without_a_kernel_none_means_xla_on_a_tpu():
    case = small("gla")
    arguments = case.arguments()
    program = compile_for("v5e", case.forward_and_backward(None), arguments, arguments["v"])
    assert "tpu_custom_call" not in program.as_text()


# --- precision --------------------------------------------------------------------------------


def imprecise_dots(jaxpr: Jaxpr) -> tuple[int, list[str]]:
    """The number of dots in a program's kernels, and those that round float32 on a TPU.

    Interpret mode computes them exactly, so no test of numbers would see it.
    """
    kernels = [x for x in equations(jaxpr) if x.primitive.name == "pallas_call"]
    dots = [
        equation
        for kernel in kernels
        for equation in equations(kernel.params["jaxpr"])
        if equation.primitive.name == "dot_general"
    ]
    without = [
        str(equation)
        for equation in dots
        if any(x.aval.dtype == jnp.float32 for x in equation.invars)
        and equation.params["precision"] is None
    ]
    return len(dots), without


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@every_op
def test_every_dot_of_float32_names_its_precision(op, dtype):
    case = small(op, dtype=dtype)
    arguments = case.arguments()
    run = case.forward_and_backward("pallas_tpu")
    count, without = imprecise_dots(jax.make_jaxpr(run)(arguments, arguments["v"]).jaxpr)
    assert count > 0
    assert not without


def test_a_dot_without_a_precision_is_found():
    def kernel(x, y):
        y[...] = jnp.dot(x[...], x[...])

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    run = pl.pallas_call(kernel, out_shape=x)
    count, without = imprecise_dots(jax.make_jaxpr(run)(x).jaxpr)
    assert count == 1
    assert without
