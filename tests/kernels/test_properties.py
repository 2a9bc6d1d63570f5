"""Gates, keys and documents as hypothesis draws them, against the float64 recurrence.

The suite draws a few; `--hypothesis-profile=long` draws a thousand a call, others in every run.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .cases import OP_IMPLEMENTATIONS, check, evaluate, random_inputs, reference

DOCUMENTS = 4

EASY = {"float32": 1e-5, "bfloat16": 6e-3}
HARD = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True)
class Call:
    """What a program is compiled for; the rest is in the arrays."""

    shape: dict[str, int]
    packed: str = "not"
    qk_l2norm: bool = False
    dtype: str = "float32"
    num_splits: int = 1


CALLS = {
    "short": Call({"length": 5, "heads": 1, "value_heads": 1, "key_size": 16, "value_size": 8}),
    "grouped": Call(
        {"length": 140, "heads": 1, "value_heads": 3, "key_size": 32, "value_size": 64},
        packed="cu_seqlens",
        qk_l2norm=True,
        dtype="bfloat16",
    ),
    "rows": Call(
        {"length": 257, "heads": 2, "value_heads": 2, "key_size": 64, "value_size": 16, "batch": 2},
        packed="segment_ids",
        qk_l2norm=True,
    ),
    "stretches": Call(
        {"length": 270, "heads": 1, "value_heads": 2, "key_size": 16, "value_size": 24},
        num_splits=3,
    ),
}
# What cuts rows into stretches sees nothing of an implementation, and kernels take long to compile.
CASES = [
    pytest.param(op, implementation, call, id=f"{op.name}-{implementation}-{name}")
    for op, implementation in OP_IMPLEMENTATIONS
    for name, call in CALLS.items()
    if call.num_splits == 1 or implementation == "xla"
]


@st.composite
def arrays(draw, op, call):
    """An op's inputs and options, and the relative error that they allow."""
    inputs = random_inputs(op, **call.shape, seed=draw(st.integers(0, 99)))
    options = {"qk_l2norm": call.qk_l2norm}
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    decay = st.sampled_from([0.5, 0.0, -1e-4, -0.1, -1.0, -7.0, -30.0, -1000.0, -np.inf])
    usual, rare = draw(decay), draw(decay)
    is_rare = rng.random(inputs["g"].shape) < draw(st.sampled_from([0.0, 0.02, 0.5]))
    inputs["g"] = np.where(is_rare, rare, usual)
    if "beta" in inputs:
        inputs["beta"] = inputs["beta"] * draw(st.sampled_from([-0.1, 0.01, 1.0, 1.9]))
        inputs["beta"][:, 1::2] *= draw(st.sampled_from([0.0, 1.0]))
    different_keys = draw(st.sampled_from([1, 7, 1000]))
    inputs["k"] = inputs["k"][:, np.arange(inputs["k"].shape[1]) % different_keys]

    if call.packed != "not":
        batch, length = inputs["v"].shape[:2]
        ends = np.sort(rng.integers(0, length + 1, (batch, DOCUMENTS - 1, 1)), axis=1)
        state = inputs["dfinal_state"]
        inputs["dfinal_state"] = rng.normal(size=(batch, DOCUMENTS, *state.shape[1:]))
    if call.packed == "cu_seqlens":
        inputs["cu_seqlens"] = np.concatenate([[0], ends.ravel(), [length]])
        inputs["initial_state"] = rng.normal(size=inputs["dfinal_state"].shape)
    if call.packed == "segment_ids":
        document = (np.arange(length) >= ends).sum(axis=1)
        padding = rng.random((batch, 1)) < 0.5
        inputs["segment_ids"] = np.where(padding & (document == 1), 0, document + 1)
        options["max_num_segments"] = DOCUMENTS
    hard = different_keys < 1000 or ("beta" in inputs and inputs["beta"].max() > 1)
    return inputs, options, (HARD if hard else EASY)[call.dtype]


@pytest.mark.parametrize(("op", "implementation", "call"), CASES)
def test_any_call_is_within_its_error(op, implementation, call):
    @given(arrays(op, call))
    def run(drawn):
        inputs, options, tolerance = drawn
        how = {"dtype": call.dtype, "num_splits": call.num_splits}
        actual = evaluate(op, implementation, inputs, **how, **options)
        check(actual, reference(op, inputs, call.dtype, **options), tolerance)

    run()
