"""Rows cut into stretches within one core: what whole rows give."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gla_layers.kernels.implementation import Implementation
from gla_layers.kernels.splits import SHORTEST_SPLIT, splits_that_pay
from gla_layers.kernels.tpu import tuning
from tests.programs import equations

from .cases import (
    GDN,
    KDA,
    OP_IDS,
    OP_IMPLEMENTATIONS,
    OPS,
    SPLIT_OPS,
    check,
    evaluate,
    random_inputs,
    reference,
    relative_error,
)

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_split_op = pytest.mark.parametrize("op", SPLIT_OPS, ids=lambda op: op.name)

# Segment ids of two rows of three stretches of 128 tokens, each as runs of (id, tokens).
LAYOUTS = {
    "documents across stretches": (
        [(1, 30), (2, 200), (3, 130)],
        [(1, 1), (2, 350), (3, 9)],
    ),
    "boundaries between stretches": (
        [(1, 128), (2, 128), (1, 104)],
        [(7, 255), (0, 1), (7, 103), (8, 1)],
    ),
    "padding": (
        [(0, 150), (5, 20), (0, 150), (5, 40)],
        [(0, 360)],
    ),
}


@pytest.mark.parametrize(("op", "implementation"), OP_IMPLEMENTATIONS, ids=OP_IDS)
def test_split_equals_whole(op, implementation):
    """Outputs, states and gradients; the last of three stretches is cut short."""
    inputs = random_inputs(op, length=360, value_heads=1, key_size=128, value_size=128)
    options = {"qk_l2norm": True, "scale": 0.5}
    actual = evaluate(op, implementation, inputs, num_splits=3, **options)
    check(actual, reference(op, inputs, **options), 1e-5)


@every_split_op
def test_packed_rows(op):
    inputs = random_inputs(op, batch=2, length=360, key_size=16, value_size=8)
    options = {"output_final_state": False}
    for layout in LAYOUTS.values():
        ids = np.stack([np.repeat(*np.transpose(runs)) for runs in layout])
        packed = dict(inputs)
        for name in op.tokens:
            fill = (ids == 0).reshape(ids.shape + (1,) * (inputs[name].ndim - 2))
            packed[name] = np.where(fill, np.nan, inputs[name])
        packed["segment_ids"] = ids
        actual = evaluate(op, "xla", packed, num_splits=3, **options)
        check(actual, reference(op, packed, **options), 1e-5)


@every_split_op
def test_one_document_a_row_has_a_state(op):
    inputs = random_inputs(op, batch=2, length=360, key_size=16, value_size=8)
    inputs["segment_ids"] = np.pad(np.full((2, 150), 7), [(0, 0), (140, 70)])
    inputs |= {name: inputs[name][:, None] for name in ("initial_state", "dfinal_state")}
    options = {"max_num_segments": 1}
    actual = evaluate(op, "xla", inputs, num_splits=3, **options)
    check(actual, reference(op, inputs, **options), 1e-5)


def outputs(op, implementation, inputs, **options):
    """o and the final state, by the path without gradients."""
    names = (*op.tokens, "initial_state", "segment_ids")
    arrays = {name: jnp.asarray(inputs[name]) for name in names if name in inputs}

    @jax.jit
    def run(arrays):
        options_ = {"output_final_state": "segment_ids" not in arrays} | options
        return op.chunk(**arrays, implementation=implementation, num_splits=3, **options_)

    return run(arrays)


def in_types(inputs, dtype):
    narrow = ("q", "k", "v")
    return {
        name: jnp.asarray(x, dtype if name in narrow else "float32") for name, x in inputs.items()
    }


@pytest.mark.parametrize("value_size", [128, 64])
@pytest.mark.parametrize("op", [GDN, KDA], ids=lambda op: op.name)
def test_without_gradients(op, value_size):
    """One run gives a stretch's map and outputs; values of 64 channels are padded for it."""
    inputs = random_inputs(op, length=360, key_size=128, value_size=value_size)
    o, state = outputs(op, "pallas_tpu", in_types(inputs, "float32"))
    expected = reference(op, inputs)
    assert relative_error(np.asarray(o), expected["o"]) < 1e-5
    assert relative_error(np.asarray(state), expected["final_state"]) < 1e-5


@pytest.mark.parametrize("op", [GDN, KDA], ids=lambda op: op.name)
def test_packed_rows_without_gradients(op):
    inputs = random_inputs(op, length=360, value_heads=1, key_size=128, value_size=128)
    ids = np.repeat([[1, 2, 0, 3]], [30, 170, 60, 100], axis=1)
    packed = inputs | {name: np.array(inputs[name]) for name in op.tokens}
    for name in op.tokens:
        packed[name][ids == 0] = np.nan
    arrays = in_types(packed, "float32") | {"segment_ids": jnp.asarray(ids)}
    o, _ = outputs(op, "pallas_tpu", arrays)
    expected = reference(op, packed | {"segment_ids": ids}, output_final_state=False)
    assert relative_error(np.asarray(o), expected["o"]) < 1e-5


@pytest.mark.parametrize("keys", ["random", "alike", "repeated"])
@every_split_op
def test_bfloat16(op, keys):
    """The errors that whole rows may have."""
    inputs = random_inputs(op, length=360, key_size=128, value_size=128)
    if keys != "random":
        one = inputs["k"][:, :1]
        inputs["k"] = one + (0 if keys == "repeated" else 0.1) * inputs["k"]
        inputs["k"] /= np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
        inputs["g"] *= 0
        inputs["initial_state"] *= 0
        if "beta" in inputs:
            inputs["beta"] = np.full_like(inputs["beta"], 1.9 if keys == "repeated" else 0.99)
    expected = reference(op, inputs, "bfloat16")
    o, state = outputs(op, "xla", in_types(inputs, "bfloat16"))
    tolerance = {"random": 5e-3, "alike": 2e-2, "repeated": 3e-2}[keys]
    assert relative_error(np.asarray(o, "float32"), expected["o"]) < tolerance
    assert relative_error(np.asarray(state), expected["final_state"]) < tolerance


@every_op
def test_a_prefix_does_not_depend_on_what_follows(op):
    inputs = in_types(random_inputs(op, length=360, key_size=16, value_size=8), "float32")
    changed = {
        name: x if "state" in name else x.at[:, 200:].multiply(0.5) for name, x in inputs.items()
    }
    o, _ = outputs(op, "xla", inputs)
    o_changed, _ = outputs(op, "xla", changed)
    np.testing.assert_array_equal(o[:, :200], o_changed[:, :200])
    assert np.any(o[:, 200:] != o_changed[:, 200:])


# --- what is cut by itself --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "length", "heads", "chains", "count"),
    [
        (1, 8 * SHORTEST_SPLIT, 1, 1, 8),
        (1, 8 * SHORTEST_SPLIT - 1024, 1, 1, 1),
        (1, 8 * SHORTEST_SPLIT + 1024, 1, 1, 8),
        (1, 8 * SHORTEST_SPLIT + 1023, 1, 1, 1),
        (1, 4 * SHORTEST_SPLIT, 2, 2, 4),
        (2, 4 * SHORTEST_SPLIT, 1, 2, 4),
        (1, 8 * SHORTEST_SPLIT, 2, 1, 1),
        (2, 8 * SHORTEST_SPLIT, 1, 1, 1),
        (1, 8 * SHORTEST_SPLIT, 1, 0, 1),
    ],
)
def test_splits_that_pay(batch, length, heads, chains, count, caplog):
    with caplog.at_level(logging.DEBUG):
        v = jax.ShapeDtypeStruct((batch, length, heads, 128), "float32")
        implementation = Implementation(None, None, split_chains=lambda *sizes: chains)
        assert splits_that_pay(implementation, v, v) == count
    assert bool(caplog.records) == (count > 1)


def kernels_of(op, *, differentiated=False, **options):
    """The names of the kernels of a call with a long row of one head."""
    length = 8 * SHORTEST_SPLIT
    inputs = random_inputs(op, length=1, value_heads=1, key_size=128, value_size=128)
    tokens = [
        jax.ShapeDtypeStruct((1, length, *inputs[name].shape[2:]), "bfloat16") for name in op.tokens
    ]

    def call(*tokens):
        return op.chunk(*tokens, **{"implementation": "pallas_tpu"} | options)[0]

    def differentiate(*tokens):
        return jax.vjp(call, *tokens)[0]

    jaxpr = jax.make_jaxpr(differentiate if differentiated else call)(*tokens).jaxpr
    return {x.params["name"] for x in equations(jaxpr) if x.primitive.name == "pallas_call"}


@pytest.mark.parametrize("op", [GDN, KDA], ids=lambda op: op.name)
def test_a_long_row_of_one_head_is_cut(op, monkeypatch):
    monkeypatch.setattr(tuning, "DEFAULT", tuning.Tuning(2, 1, 16 * tuning.MIB, split_chains=1))
    assert "add_reads" in kernels_of(op)
    assert "add_reads" not in kernels_of(op, num_splits=1)
    assert not kernels_of(op, implementation="xla")
    assert "add_reads" not in kernels_of(op, differentiated=True)


# --- wrong calls ------------------------------------------------------------------------------


@every_op
def test_a_state_a_document(op):
    inputs = in_types(random_inputs(op, length=12), "float32")
    tokens = [inputs[name] for name in op.tokens]
    with pytest.raises(ValueError, match="num_splits must leave the time axis whole where each"):
        op.chunk(
            *tokens,
            segment_ids=jnp.ones((1, 12), int),
            max_num_segments=2,
            output_final_state=True,
            num_splits=2,
        )


@every_op
def test_token_by_token(op):
    inputs = in_types(random_inputs(op, length=12), "float32")
    tokens = [inputs[name] for name in op.tokens]
    for call in (op.recurrent, lambda *x, **o: op.chunk(*x, implementation="reference", **o)):
        with pytest.raises(
            ValueError, match=r"num_splits must leave .* implementation='reference'"
        ):
            call(*tokens, num_splits=2)
