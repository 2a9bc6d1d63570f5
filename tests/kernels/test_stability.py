"""Long rows in float32: what a chunk is off by does not add up."""

import pytest

from .cases import OPS, OPS_WITH_KERNELS, check, evaluate, reference
from .hard_inputs import COLUMNS

LENGTH = 65536
INTERPRETED_LENGTH = 4096
# Reflections (beta 1.9 along few keys) that nothing fades: an error stays for ever. The recurrence
# itself, token by token in float32, is then off by 1.1e-5, and 1.1e-6 at 1024 tokens. A chunk is
# off by more since it holds its inverse, of norm 14 where what a chunk does to a state has norm 1:
# the exact inverse, only rounded to float32, leaves a state 1.8e-6 off after one chunk of 128
# tokens, the recurrence 3.2e-7.
TOLERANCES = {"repeated keys, no decay": 2e-4}


@pytest.mark.slow
@pytest.mark.parametrize("column", ["random", "close keys", "repeated keys, no decay"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_long_row(op, column):
    make, allowed = COLUMNS[column]
    inputs = make(op, length=LENGTH, key_size=16, value_size=16)
    tolerance = TOLERANCES.get(column, allowed["float32"])
    check(evaluate(op, "xla", inputs), reference(op, inputs), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("column", ["random", "repeated keys, no decay", "erasing tokens"])
@pytest.mark.parametrize("op", OPS_WITH_KERNELS, ids=lambda op: op.name)
def test_a_long_row_of_the_kernels(op, column):
    make, allowed = COLUMNS[column]
    inputs = make(op, length=INTERPRETED_LENGTH, key_size=16, value_size=16)
    check(evaluate(op, "pallas_tpu", inputs), reference(op, inputs), allowed["float32"])
