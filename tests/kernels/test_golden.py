"""The ops against arrays that other implementations computed in float64."""

import pathlib

import numpy as np
import pytest

from .cases import OP_IMPLEMENTATIONS, OPS, Op, evaluate

DATA = pathlib.Path(__file__).parents[1] / "data"
HARD = {
    # Chunked forms lose about a digit on one key repeated with beta 1.9, and to sums of order 1000.
    "repeat_beta1.9_g0": (1e-4, 2.5e-4),
    "g_minus1000": (5e-4, 5e-4),
}


def golden(op: Op) -> list[str]:
    return [path.stem.removeprefix(f"op_{op.name}_") for path in DATA.glob(f"op_{op.name}_*.npz")]


def load(op: Op, case: str) -> tuple[dict[str, np.ndarray], dict]:
    arrays = dict(np.load(DATA / f"op_{op.name}_{case}.npz"))
    options = {"scale": float(arrays.pop("scale"))}
    if "cu_seqlens" in arrays:
        for name in ("initial_state", "final_state", "dinitial_state", "dfinal_state"):
            arrays[name] = arrays[name][None]
    return arrays, options


def check(op, arrays, actual, forward_tolerance, gradient_tolerance):
    # dg is about 1e-9 under strong decay: it is compared with the size of the other gradients.
    floors = {"dg": np.abs(arrays["dv"]).max()}
    for name, value in actual.items():
        tolerance = forward_tolerance if name in ("o", "final_state") else gradient_tolerance
        expected = arrays[name]
        error = np.abs(value - expected).max()
        bound = tolerance * max(np.abs(expected).max(), floors.get(name, 0))
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


def inputs_of(op, arrays):
    names = (*op.tokens, "initial_state", "do", "dfinal_state", "cu_seqlens")
    return {name: arrays[name] for name in names if name in arrays}


REFERENCE_CASES = [(op, case) for op in OPS for case in golden(op)]


@pytest.mark.parametrize(
    ("op", "case"), REFERENCE_CASES, ids=[f"{op.name}-{case}" for op, case in REFERENCE_CASES]
)
def test_reference_in_float64(op, case):
    arrays, options = load(op, case)
    actual = evaluate(op, "reference", inputs_of(op, arrays), dtype="float64", **options)
    check(op, arrays, actual, 1e-6, 1e-6)


CHUNK_CASES = [
    (op, implementation, case) for op, implementation in OP_IMPLEMENTATIONS for case in golden(op)
]


@pytest.mark.parametrize(
    ("op", "implementation", "case"),
    CHUNK_CASES,
    ids=[f"{op.name}-{implementation}-{case}" for op, implementation, case in CHUNK_CASES],
)
def test_chunked_in_float32(op, implementation, case):
    arrays, options = load(op, case)
    actual = evaluate(op, implementation, inputs_of(op, arrays), **options)
    check(op, arrays, actual, *HARD.get(case, (1e-5, 2e-5)))
