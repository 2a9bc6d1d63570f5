"""The ops on meshes of eight devices: sharded equals unsharded, and nothing moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.tpu_compiler import compile_for, pod

from .cases import (
    GLA,
    OP_IDS,
    OP_IMPLEMENTATIONS,
    OPS,
    OPS_WITH_KERNELS,
    SIMPLE_GLA,
    SPLIT_OPS,
    random_inputs,
    reference,
    relative_error,
)

COLLECTIVES = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\b"

# Axis sizes, and how [B, T, heads] are split.
MESHES = {
    "heads": ({"tensor": 2}, P(None, None, "tensor")),
    "rows and heads": ({"data": 2, "fsdp": 2, "tensor": 2}, P(("data", "fsdp"), None, "tensor")),
}
every_implementation = pytest.mark.parametrize(
    ("op", "implementation"), OP_IMPLEMENTATIONS, ids=OP_IDS
)
AXIS_TYPES = (AxisType.Explicit, AxisType.Auto)


def on_every_axis_type(cases):
    """Cases (op, implementation, ...) with the types of a mesh's axes.

    A kernel sees nothing of these, and takes long to compile: on Auto axes only SimpleGLA's run.
    """
    return [
        pytest.param(*case, kind, id="-".join([case[0].name, *case[1:], kind.name]))
        for case in cases
        for kind in AXIS_TYPES
        if kind is AxisType.Explicit or case[1] != "pallas_tpu" or case[0] is SIMPLE_GLA
    ]


def make_mesh(sizes, axis_type):
    kinds = (axis_type,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def spec_of(name, x, partition):
    rows, time, heads, *_ = (*partition, None, None, None)
    if name == "cu_seqlens":
        return P()
    if name == "segment_ids":
        return P(rows, time)
    if "state" in name:
        return P(rows, heads) if x.ndim == 4 else P(rows, None, heads)
    return P(rows, time, heads)


def run_sharded(op, implementation, inputs, sizes, partition, axis_type, **options):
    """Outputs and gradients, and the compiled program."""
    names, packing = (*op.tokens, "initial_state"), ("segment_ids", "cu_seqlens")
    passed = partition if axis_type is AxisType.Auto else None
    options = {"output_final_state": True} | options

    def both(arrays, packing, cotangents):
        def forward(arrays):
            arrays = dict(arrays)
            tokens = [arrays.pop(name) for name in op.tokens]
            return op.chunk(
                *tokens,
                **arrays,
                **packing,
                implementation=implementation,
                partition=passed,
                **options,
            )

        (o, state), vjp = jax.vjp(forward, arrays)
        gradients = {f"d{name}": x for name, x in vjp(cotangents)[0].items()}
        outputs = {"o": o} if state is None else {"o": o, "final_state": state}
        return outputs | gradients

    mesh = make_mesh(sizes, axis_type)
    with jax.set_mesh(mesh):

        def put(name):
            x = jnp.asarray(inputs[name], "int32" if name in packing else "float32")
            return jax.device_put(x, NamedSharding(mesh, spec_of(name, x, partition)))

        def put_all(names):
            return {name: put(name) for name in names if name in inputs}

        cotangents = put("do"), put("dfinal_state") if options["output_final_state"] else None
        arguments = put_all(names), put_all(packing), cotangents
        compiled = jax.jit(both).lower(*arguments).compile()
        outputs = compiled(*arguments)
    return {name: np.asarray(x) for name, x in outputs.items()}, compiled.as_text()


@pytest.mark.parametrize(
    ("op", "implementation", "mesh", "axis_type"),
    on_every_axis_type(
        [(*case, "rows and heads") for case in OP_IMPLEMENTATIONS]
        + [(op, "xla", "heads") for op in SPLIT_OPS]
    ),
)
def test_sharded_equals_unsharded(op, implementation, mesh, axis_type):
    sizes, partition = MESHES[mesh]
    inputs = random_inputs(
        op, batch=4, length=140, heads=2, value_heads=4, key_size=16, value_size=8
    )
    actual, program = run_sharded(op, implementation, inputs, sizes, partition, axis_type)
    assert not re.search(COLLECTIVES, program)
    for name, expected in reference(op, inputs).items():
        assert relative_error(actual[name], expected) < 1e-5, name


@pytest.mark.parametrize(
    ("op", "implementation", "axis_type"), on_every_axis_type(OP_IMPLEMENTATIONS)
)
def test_packed_rows_with_a_state_a_document(op, implementation, axis_type):
    inputs = random_inputs(op, batch=2, length=140, heads=2, value_heads=2, key_size=16)
    ids = 1 + (np.arange(140) >= np.array([[50], [128]]))
    inputs |= {"segment_ids": ids, "dfinal_state": np.stack([inputs["dfinal_state"]] * 2, axis=1)}
    sizes, partition = {"data": 2, "tensor": 2}, P("data", None, "tensor")
    options = {"max_num_segments": 2}
    actual, program = run_sharded(
        op, implementation, inputs, sizes, partition, axis_type, **options
    )
    assert not re.search(COLLECTIVES, program)
    for name, expected in reference(op, inputs, **options).items():
        assert relative_error(actual[name], expected) < 1e-5, name


@every_implementation
def test_within_the_callers_shard_map(op, implementation):
    inputs = random_inputs(op, batch=2, length=20, key_size=8, value_size=8)
    tokens = [jnp.asarray(inputs[name], "float32") for name in op.tokens]

    def loss(*tokens):
        o, _ = op.chunk(*tokens, implementation=implementation)
        return (o**2).sum(axis=(1, 2, 3))

    mesh = make_mesh({"data": 2}, AxisType.Auto)
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(loss, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        actual = jax.jit(jax.grad(lambda *x: sharded(*x).sum()))(*tokens)
    expected = jax.grad(lambda *x: loss(*x).sum())(*tokens)
    assert relative_error(np.asarray(actual), np.asarray(expected, "float64")) < 1e-6


# --- wrong calls and fall-backs ---------------------------------------------------------------


def tokens_of(op, **shape):
    inputs = random_inputs(op, **({"length": 11, "key_size": 8, "value_size": 8} | shape))
    return [jnp.asarray(inputs[name], "float32") for name in op.tokens]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (P("data"), "q must have a multiple of 2 batch rows, .*'data'.*, got 3"),
        (P(None, "data"), "q must have a multiple of 2 tokens, .*'data'.*, got 11"),
        (P(None, None, "data"), "q must have a multiple of 2 heads, .*'data'.*, got 1"),
        (P("rows"), r"partition must name axes of the mesh, \('data',\), each once, got .*'rows'"),
        (P("data", "data"), r"partition must name axes of the mesh, \('data',\), each once, got"),
        (P(None, None, None, "data"), "partition must be None or a PartitionSpec of"),
        ("data", "partition must be None or a PartitionSpec of"),
    ],
)
def test_wrong_partitions(op, partition, message):
    with (
        jax.set_mesh(make_mesh({"data": 2}, AxisType.Auto)),
        pytest.raises(ValueError, match=message),
    ):
        op.chunk(*tokens_of(op, batch=3), partition=partition)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_partition_needs_a_mesh(op):
    with pytest.raises(ValueError, match=r"partition names axes of a mesh, but none is in context"):
        op.chunk(*tokens_of(op), partition=P("data"))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_explicit_shardings_must_agree(op):
    mesh = make_mesh({"data": 2}, AxisType.Explicit)
    q, *rest = tokens_of(op, batch=2)
    with jax.set_mesh(mesh):
        q = jax.device_put(q, NamedSharding(mesh, P("data")))
        rest = [jax.device_put(x, NamedSharding(mesh, P())) for x in rest]
        with pytest.raises(ValueError, match="k must be sharded as q is"):
            op.chunk(q, *rest)


@pytest.mark.parametrize("op", OPS_WITH_KERNELS, ids=lambda op: op.name)
def test_kernels_on_auto_axes_need_a_partition(op):
    with (
        jax.set_mesh(make_mesh({"data": 2}, AxisType.Auto)),
        pytest.raises(ValueError, match="partition must say how"),
    ):
        op.chunk(*tokens_of(op, batch=2), implementation="pallas_tpu")


@pytest.mark.parametrize("op", OPS_WITH_KERNELS, ids=lambda op: op.name)
def test_plain_jax_in_place_of_kernels_is_told(op):
    mesh = pod("v5e", "2x2", {"data": 4})
    tokens = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tokens_of(op, batch=4)]
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        pytest.warns(UserWarning, match="falls back to plain JAX: the mesh has Auto axes"),
    ):
        jax.jit(op.chunk).trace(*tokens)


def test_nothing_is_told_where_there_is_no_kernel():
    mesh = pod("v5e", "2x2", {"data": 4})
    tokens = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tokens_of(GLA, batch=4)]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(GLA.chunk).trace(*tokens)


@pytest.mark.parametrize(
    ("op", "axis_type"),
    [*((op, AxisType.Explicit) for op in OPS_WITH_KERNELS), (SIMPLE_GLA, AxisType.Auto)],
    ids=lambda x: x.name,
)
def test_compiles_for_a_pod_without_collectives(op, axis_type):
    """Forward and backward for 2 x 4 v5e chips, rows over one axis and heads over the other."""
    mesh = pod("v5e", "2x4", {"data": 4, "tensor": 2}, axis_type)
    partition = P("data", None, "tensor")
    arrays = tokens_of(op, batch=4, length=300, heads=2, value_heads=4, key_size=128)
    tokens = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, partition))
        for x in arrays
    ]
    passed = partition if axis_type is AxisType.Auto else None

    def gradients(*tokens):
        def loss(*tokens):
            return op.chunk(*tokens, partition=passed)[0].sum()

        return jax.grad(loss, argnums=range(len(tokens)))(*tokens)

    program = compile_for("v5e", gradients, *tokens, mesh=mesh).as_text()
    assert "tpu_custom_call" in program
    assert not re.search(COLLECTIVES, program)
