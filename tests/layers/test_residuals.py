"""What a layer keeps for its backward pass, in bytes a token."""

import jax
import pytest

from benchmarks.layer_cases import Case

OPS = {"GatedDeltaNet": "gated_delta_rule", "KDA": "kda", "SimpleGLA": "simple_gla"}


@pytest.mark.parametrize("documents", [0, 5], ids=["one document", "packed"])
@pytest.mark.parametrize(
    ("layer", "most"), {"GatedDeltaNet": 55e3, "KDA": 91e3, "SimpleGLA": 42e3}.items()
)
def test_by_default(layer, most, documents):
    assert Case(layer, 8192, documents).residual_bytes() < most


@pytest.mark.parametrize(
    ("layer", "most"), {"GatedDeltaNet": 17e3, "KDA": 21e3, "SimpleGLA": 5e3}.items()
)
def test_what_the_op_reads(layer, most):
    names = ("states", "inverse", "x", "attention", "v_new")
    named = (f"chunk_{OPS[layer]}_{name}" for name in names)
    policy = jax.checkpoint_policies.save_only_these_names(*named)
    assert 0 < Case(layer, 8192).residual_bytes(policy) < most


def test_nothing():
    policy = jax.checkpoint_policies.nothing_saveable
    assert Case("GatedDeltaNet", 8192).residual_bytes(policy) < 100
