"""Several batch rows in one grid step of a kernel: what each gets alone."""

import jax
import numpy as np
import pytest

from gla_layers.kernels.tpu import tuning
from gla_layers.kernels.tpu.blocks import Blocks

from .cases import OPS_WITH_KERNELS, check, evaluate, random_inputs, reference

every_op = pytest.mark.parametrize("op", OPS_WITH_KERNELS, ids=lambda op: op.name)


@pytest.mark.parametrize(
    ("batch", "heads", "limit", "cores", "rows"),
    [
        (8, 1, 16, 1, 8),
        (8, 1, 4, 1, 4),
        (6, 1, 4, 1, 3),
        (8, 4, 16, 1, 4),
        (8, 32, 16, 1, 1),
        (8, 1, 16, 2, 4),
        (8, 16, 32, 2, 2),
        (3, 1, 16, 2, 1),
        (1, 1, 16, 2, 1),
        (4, 32, 16, 2, 1),
    ],
)
def test_rows_a_block(batch, heads, limit, cores, rows):
    """As many as the block's heads allow, and a block for every core."""
    x = jax.ShapeDtypeStruct((batch, 300, heads, 128), "float32")
    tuned = tuning.Tuning(heads=limit, chunks=2, vmem_limit_bytes=0, cores=cores)
    assert Blocks.of(x, x, tuned, one_chunk=False).batch_rows == rows
    assert Blocks.of(x, x, tuned, one_chunk=True).batch_rows == 1


@every_op
def test_packed_rows(op):
    """Two blocks of two rows, of different documents, with garbage for padding."""
    runs = [
        [(1, 100), (2, 71)],
        [(0, 130), (3, 41)],
        [(1, 20), (0, 20), (2, 80), (3, 30), (0, 21)],
        [(0, 171)],
    ]
    ids = np.stack([np.repeat(*np.transpose(row)) for row in runs])
    inputs = random_inputs(op, batch=4, length=171, value_heads=1, value_size=128, key_size=128)
    for name in op.tokens:
        inputs[name][ids == 0] = np.nan
    inputs["segment_ids"] = ids
    options = {"output_final_state": False}
    check(
        evaluate(op, "pallas_tpu", inputs, **options),
        reference(op, inputs, **options),
        1e-5,
    )


@every_op
def test_rows_of_several_heads(op, monkeypatch):
    """A block of two rows of two heads, which share registers, cut short in time."""
    monkeypatch.setattr(tuning, "DEFAULT", tuning.Tuning(4, 1, 16 * tuning.MIB))
    inputs = random_inputs(op, batch=2, length=171)
    options = {"qk_l2norm": True}
    check(
        evaluate(op, "pallas_tpu", inputs, **options),
        reference(op, inputs, **options),
        1e-5,
    )
