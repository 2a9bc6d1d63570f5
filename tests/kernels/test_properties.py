"""Any shape, packing, gate and type, drawn by hypothesis, against the float64 recurrence."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .cases import OP_IDS, OP_IMPLEMENTATIONS, check, evaluate, random_inputs, reference

# Few of them, since each is compiled: what varies freely is what the arrays hold.
SHAPES = [
    {"length": 5, "heads": 1, "value_heads": 1, "key_size": 16, "value_size": 8},
    {"length": 140, "heads": 1, "value_heads": 3, "key_size": 32, "value_size": 64},
    {"length": 257, "heads": 2, "value_heads": 2, "key_size": 64, "value_size": 16, "batch": 2},
]
DOCUMENTS = 4

EASY = {"float32": 1e-5, "bfloat16": 6e-3}
HARD = {"float32": 1e-4, "bfloat16": 3e-2}


@st.composite
def calls(draw, op):
    """An op's inputs and options, and the relative error that they allow."""
    inputs = random_inputs(op, **draw(st.sampled_from(SHAPES)), seed=draw(st.integers(0, 99)))
    options = {"qk_l2norm": draw(st.booleans())}
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    decay = st.sampled_from([0.0, -1e-4, -0.1, -1.0, -7.0, -30.0, -1000.0, -np.inf])
    usual, rare = draw(decay), draw(decay)
    is_rare = rng.random(inputs["g"].shape) < draw(st.sampled_from([0.0, 0.02, 0.5]))
    inputs["g"] = np.where(is_rare, rare, usual)
    if "beta" in inputs:
        inputs["beta"] = inputs["beta"] * draw(st.sampled_from([0.01, 1.0, 1.9]))
        inputs["beta"][:, 1::2] *= draw(st.sampled_from([0.0, 1.0]))
    different_keys = draw(st.sampled_from([1, 7, 1000]))
    inputs["k"] = inputs["k"][:, np.arange(inputs["k"].shape[1]) % different_keys]

    packed = draw(st.sampled_from(["not", "a state a row", "a state a document"]))
    if packed != "not":
        batch, length = inputs["v"].shape[:2]
        ends = np.sort(rng.integers(0, length + 1, (batch, DOCUMENTS - 1, 1)), axis=1)
        document = (np.arange(length) >= ends).sum(axis=1)
        padding = rng.random((batch, 1)) < 0.5
        inputs["segment_ids"] = np.where(padding & (document == 1), 0, document + 1)
    if packed == "a state a row":
        options["output_final_state"] = False
    if packed == "a state a document":
        options["max_num_segments"] = DOCUMENTS
        state = inputs["dfinal_state"]
        inputs["dfinal_state"] = rng.normal(size=(state.shape[0], DOCUMENTS, *state.shape[1:]))
    hard = different_keys < 1000 or ("beta" in inputs and inputs["beta"].max() > 1)
    return inputs, options, HARD if hard else EASY


@pytest.mark.slow
@pytest.mark.parametrize(("op", "implementation"), OP_IMPLEMENTATIONS, ids=OP_IDS)
def test_any_call_is_within_its_error(op, implementation):
    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(op), st.sampled_from(["float32", "bfloat16"]))
    def run(call, dtype):
        inputs, options, tolerances = call
        actual = evaluate(op, implementation, inputs, dtype=dtype, **options)
        expected = reference(op, inputs, dtype, **options)
        check(actual, expected, tolerances[dtype])

    run()
