"""Rows whose time axis is split over devices: what whole rows give, and only states move."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.tpu_compiler import compile_for, pod

from .cases import (
    OP_IMPLEMENTATIONS,
    OPS,
    OPS_WITH_KERNELS,
    SIMPLE_GLA,
    SPLIT_OPS,
    check,
    evaluate,
    random_inputs,
    reference,
    relative_error,
)
from .test_sharding import COLLECTIVES, make_mesh, on_every_axis_type, run_sharded, tokens_of

# Axis sizes, and how [B, T, heads] are split.
MESHES = {
    "2": ({"sequence": 2}, P(None, "sequence")),
    "4": ({"sequence": 4}, P(None, "sequence")),
    "8": ({"sequence": 8}, P(None, "sequence")),
    "rows": ({"data": 2, "sequence": 4}, P("data", "sequence")),
    "heads": ({"sequence": 4, "tensor": 2}, P(None, "sequence", "tensor")),
    "two axes": ({"outer": 2, "tensor": 2, "inner": 2}, P(None, ("outer", "inner"), "tensor")),
}
every_mesh = pytest.mark.parametrize(("sizes", "partition"), MESHES.values(), ids=MESHES)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_split_op = pytest.mark.parametrize("op", SPLIT_OPS, ids=lambda op: op.name)

# Segment ids of two rows of 4 stretches of 40 tokens, each as runs of (id, tokens).
LAYOUTS = {
    "documents across stretches": (
        [(1, 30), (2, 60), (3, 70)],
        [(1, 1), (2, 150), (3, 9)],
    ),
    "boundaries between stretches": (
        [(1, 40), (2, 40), (1, 80)],
        [(7, 80), (0, 1), (7, 39), (8, 40)],
    ),
    "padding": (
        [(0, 50), (5, 20), (0, 60), (5, 30)],
        [(0, 40), (3, 39), (0, 1), (3, 79), (0, 1)],
    ),
    "more padding": (
        [(1, 40), (0, 120)],
        [(0, 160)],
    ),
}


def random_rows(op, **shape):
    small = {"heads": 2, "value_heads": 4, "key_size": 16, "value_size": 8}
    return random_inputs(op, **({"batch": 2, "length": 160} | small | shape))


def nan_in_padding(inputs, valid):
    def fill(x):
        return np.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, np.nan)

    return {name: x if "state" in name else fill(x) for name, x in inputs.items()}


def evaluate_split(op, count, inputs, **options):
    """`evaluate`, compiled once for all inputs of one shape."""
    with jax.set_mesh(make_mesh({"sequence": count}, AxisType.Auto)):
        return evaluate(op, "xla", inputs, partition=P(None, "sequence"), **options)


@every_mesh
@every_split_op
def test_split_equals_whole(op, sizes, partition):
    inputs = random_rows(op, length=400)
    actual, _ = run_sharded(op, "xla", inputs, sizes, partition, AxisType.Auto)
    check(actual, reference(op, inputs), 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@every_split_op
def test_packed_rows(op, layout):
    ids = np.stack([np.repeat(*np.transpose(runs)) for runs in layout])
    inputs, packing = random_rows(op), {"segment_ids": ids}
    options = {"output_final_state": False}
    actual = evaluate_split(op, 4, nan_in_padding(inputs, ids != 0) | packing, **options)
    check(actual, reference(op, inputs | packing, **options), 1e-5)


@every_split_op
def test_any_documents(op):
    """Rows of eight stretches of three tokens, with documents and padding of any length."""
    rng = np.random.default_rng(0)
    inputs, options = random_rows(op, batch=4, length=24), {"output_final_state": False}
    for _ in range(20):
        draws = rng.choice([0, 0, 1, 2, 3], size=(4, 24))
        lengths = rng.integers(1, rng.choice([2, 5, 24], size=(4, 1)) + 1, size=(4, 24))
        ids = np.stack([np.repeat(*row)[:24] for row in zip(draws, lengths, strict=True)])
        packed = inputs | {"segment_ids": ids}
        actual = evaluate_split(op, 8, packed, **options)
        check(actual, reference(op, packed, **options), 1e-5)


@every_split_op
def test_one_document_a_row_has_a_state(op):
    ids = np.pad(np.full((2, 90), 7), [(0, 0), (50, 20)])
    inputs = random_rows(op) | {"segment_ids": ids}
    inputs |= {name: inputs[name][:, None] for name in ("initial_state", "dfinal_state")}
    options = {"max_num_segments": 1}
    actual = evaluate_split(op, 4, inputs, **options)
    check(actual, reference(op, inputs, **options), 1e-5)
    ids[0, 60:] = 8
    state = evaluate_split(op, 4, inputs, **options)["final_state"]
    assert np.isnan(state[0]).all()
    assert np.isfinite(state[1]).all()


@pytest.mark.parametrize("offsets", [[0, 30, 90, 160], [0, 0, 40, 40, 120, 130]])
@every_split_op
def test_cu_seqlens(op, offsets):
    inputs = random_rows(op, batch=1) | {"cu_seqlens": np.array(offsets)}
    options = {"output_final_state": False}
    actual, _ = run_sharded(op, "xla", inputs, *MESHES["4"], AxisType.Explicit, **options)
    check(actual, reference(op, inputs, **options), 1e-5)


@pytest.mark.parametrize(
    ("op", "implementation", "axis_type"), on_every_axis_type(OP_IMPLEMENTATIONS)
)
def test_every_implementation(op, implementation, axis_type):
    inputs = random_rows(op, length=200, value_heads=2)
    sizes, partition = MESHES["heads"] if axis_type is AxisType.Explicit else MESHES["2"]
    options = {"qk_l2norm": True, "scale": 0.5}
    actual, _ = run_sharded(op, implementation, inputs, sizes, partition, axis_type, **options)
    check(actual, reference(op, inputs, **options), 1e-5)


@every_op
def test_without_gradients(op):
    inputs = random_rows(op)
    arrays = {name: jnp.asarray(inputs[name], "float32") for name in (*op.tokens, "initial_state")}
    options = {"output_final_state": True, "partition": P("data", "sequence")}
    with jax.set_mesh(make_mesh({"data": 2, "sequence": 4}, AxisType.Auto)):
        o, state = jax.jit(lambda arrays: op.chunk(**arrays, **options))(arrays)
    expected = reference(op, inputs)
    assert relative_error(np.asarray(o), expected["o"]) < 1e-5
    assert relative_error(np.asarray(state), expected["final_state"]) < 1e-5


@every_op
def test_bfloat16(op):
    inputs = random_inputs(op, length=512)
    actual = evaluate_split(op, 4, inputs, dtype="bfloat16")
    check(actual, reference(op, inputs, "bfloat16"), 5e-3)


@pytest.mark.parametrize("op", OPS_WITH_KERNELS, ids=lambda op: op.name)
def test_only_maps_move(op):
    """For 2 x 4 v5e chips: one collective forward and one backward, of M and E a head."""
    mesh = pod("v5e", "2x4", {"sequence": 4, "tensor": 2}, AxisType.Explicit)
    sharding = NamedSharding(mesh, P(None, "sequence", "tensor"))
    tokens = [
        jax.ShapeDtypeStruct(x.shape, "bfloat16", sharding=sharding)
        for x in tokens_of(op, length=1024, heads=2, value_heads=2, key_size=64, value_size=128)
    ]

    def both(do, *tokens):
        o, vjp = jax.vjp(lambda *tokens: op.chunk(*tokens)[0], *tokens)
        return o, vjp(do)

    program = compile_for("v5e", both, tokens[2], *tokens, mesh=mesh).as_text()
    assert "tpu_custom_call" in program
    moved = re.findall(rf" (\w+\[[\d,]*\])\S* ({COLLECTIVES[3:-3]})\(.*channel_id=(\d+)", program)
    transition = 1024 if op is SIMPLE_GLA else 64 * 64  # a number, padded to a tile
    maps = f"f32[{4 * (transition + 64 * 128)}]"
    assert [(shape, kind) for shape, kind, _ in sorted(set(moved))] == [(maps, "all-gather")] * 2


# --- wrong calls --------------------------------------------------------------------------------


@every_op
def test_a_state_a_document(op):
    ids = np.ones((1, 12), "int32")
    with (
        jax.set_mesh(make_mesh({"sequence": 2}, AxisType.Auto)),
        pytest.raises(ValueError, match="partition must leave the time axis whole where each doc"),
    ):
        op.chunk(
            *tokens_of(op, length=12),
            segment_ids=ids,
            max_num_segments=2,
            output_final_state=True,
            partition=P(None, "sequence"),
        )


@every_op
def test_stretches_within_a_device(op):
    with (
        jax.set_mesh(make_mesh({"sequence": 2}, AxisType.Auto)),
        pytest.raises(ValueError, match="num_splits must be None or 1 where partition splits"),
    ):
        op.chunk(*tokens_of(op, length=12), num_splits=2, partition=P(None, "sequence"))


@every_op
def test_token_by_token(op):
    with (
        jax.set_mesh(make_mesh({"sequence": 2}, AxisType.Auto)),
        pytest.raises(ValueError, match="whole for implementation='reference'"),
    ):
        op.recurrent(*tokens_of(op, length=12), partition=P(None, "sequence"))


@every_op
def test_within_the_callers_shard_map(op):
    def call(*tokens):
        return op.chunk(*tokens, partition=P(None, "sequence"))[0]

    specs = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    with (
        jax.set_mesh(make_mesh({"sequence": 2}, AxisType.Auto)),
        pytest.raises(ValueError, match="whole within the caller's own"),
    ):
        jax.shard_map(call, **specs)(*tokens_of(op, length=12))
