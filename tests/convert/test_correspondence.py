"""Tensors from parameters and back: which channel lies where."""

import numpy as np
import pytest

from gla_layers.convert.correspondence import (
    PER_HEAD_4D,
    convolution,
    embedding,
    linear,
    norm,
    vector,
)


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_one_map():
    rule = linear("out_proj", "o_proj")
    assert (rule.tensor, rule.parameters) == ("out_proj.weight", ("o_proj.kernel",))
    (kernel,) = rule.split(numbers(2, 3), [(3, 2)])
    np.testing.assert_array_equal(kernel, [[0, 3], [1, 4], [2, 5]])


def test_several_maps_one_after_the_other():
    rule = linear("qk", "q", "k")
    q, k = rule.split(numbers(6, 1), [(1, 4), (1, 2)])
    np.testing.assert_array_equal(q, [[0, 1, 2, 3]])
    np.testing.assert_array_equal(k, [[4, 5]])


def test_several_maps_within_each_head():
    rule = linear("qk", "q", "k", per_head=True).of_heads(2)
    q, k = rule.split(numbers(6, 1), [(1, 4), (1, 2)])
    np.testing.assert_array_equal(q, [[0, 1, 3, 4]])
    np.testing.assert_array_equal(k, [[2, 5]])


def test_depthwise_convolution():
    (kernel,) = convolution("conv").split(numbers(2, 1, 3), [(3, 2)])
    np.testing.assert_array_equal(kernel, [[0, 3], [1, 4], [2, 5]])


CASES = {
    "linear": (linear("a"), [(3, 4)], (4, 3)),
    "fused": (linear("a", "b", "c"), [(3, 4), (3, 2)], (6, 3)),
    "per-head": (linear("a", "b", "c", per_head=True).of_heads(2), [(3, 4), (3, 2)], (6, 3)),
    "convolution": (convolution("a", "b", "c"), [(4, 3), (4, 5)], (8, 1, 4)),
    "norm": (norm("a"), [(5,)], (5,)),
    "embedding": (embedding("a"), [(5, 2)], (5, 2)),
    "vector": (vector("a", form=PER_HEAD_4D), [(5,)], (1, 1, 5, 1)),
}


@pytest.mark.parametrize(("rule", "shapes", "tensor_shape"), CASES.values(), ids=CASES)
def test_split_and_join_are_inverse(rule, shapes, tensor_shape):
    assert rule.tensor_shape(shapes) == tensor_shape
    tensor = numbers(*tensor_shape)
    parameters = rule.split(tensor, shapes)
    assert [parameter.shape for parameter in parameters] == shapes
    np.testing.assert_array_equal(rule.join(parameters), tensor)
