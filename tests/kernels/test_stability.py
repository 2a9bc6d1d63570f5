"""Long rows in float32: what a chunk is off by does not add up."""

import pytest

from .cases import OPS, OPS_WITH_KERNELS, check, evaluate, reference
from .hard_inputs import COLUMNS

LENGTH = 65536
INTERPRETED_LENGTH = 4096


@pytest.mark.slow
@pytest.mark.parametrize("column", ["random", "close keys", "repeated keys, no decay"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_long_row(op, column):
    make, allowed = COLUMNS[column]
    inputs = make(op, length=LENGTH, key_size=16, value_size=16)
    check(evaluate(op, "xla", inputs), reference(op, inputs), allowed["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("column", ["random", "repeated keys, no decay", "erasing tokens"])
@pytest.mark.parametrize("op", OPS_WITH_KERNELS, ids=lambda op: op.name)
def test_a_long_row_of_the_kernels(op, column):
    make, allowed = COLUMNS[column]
    inputs = make(op, length=INTERPRETED_LENGTH, key_size=16, value_size=16)
    check(evaluate(op, "pallas_tpu", inputs), reference(op, inputs), allowed["float32"])
