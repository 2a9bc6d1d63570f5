"""Rows of metrics from the outcomes of steps, and what is said of odd ones."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from profiling import Profiler
from step_log import PATIENCE, RECENT, Diverged, StepLog


def outcome(bits=1.0, norm=1.0):
    return {"loss": np.float32(bits * math.log(2)), "gradient_norm": np.float32(norm)}


def test_a_step_is_the_mean_of_its_batches():
    log = StepLog(peak_tokens_per_second=1e9)
    for bits, norm in ((1, 3), (2, 5)):
        log.add(1, outcome(bits, norm), 10)
    (row,) = log.rows()
    assert row["step"] == 1
    np.testing.assert_allclose([row["bits_per_byte"], row["gradient_norm"]], [1.5, 4], rtol=1e-6)
    assert row["mfu"] == row["tokens_per_second"] / 1e9
    assert "skipped_batches" not in row
    log.restart()
    assert log.rows() == []
    assert "mfu" not in _rows(StepLog(), outcome())[0]


def _rows(log, *outcomes, first=1):
    for step, x in enumerate(outcomes, start=first):
        log.add(step, x, 10)
    rows = log.rows()
    log.restart()
    return rows


@pytest.mark.parametrize("bad", [outcome(np.nan, np.nan), outcome(1.0, np.inf)])
def test_skipped_batches_are_counted_and_told(bad, capsys):
    one, two = _rows(StepLog(), outcome(), bad)
    assert "skipped_batches" not in one
    assert two["skipped_batches"] == 1
    assert "gradient_norm" not in two
    assert ("bits_per_byte" in two) == np.isfinite(bad["loss"])
    assert "step 2: 1 batches without a finite gradient" in capsys.readouterr().err


def test_a_run_without_gradients_is_given_up():
    log = StepLog()
    bad = outcome(np.nan, np.nan)
    _rows(log, *[bad] * (PATIENCE - 1))
    _rows(log, outcome())
    _rows(log, *[bad] * (PATIENCE - 1))
    with pytest.raises(Diverged, match="none of the 10 steps up to 99 had a finite gradient; try"):
        _rows(log, bad, first=99)


def test_a_spike_is_told(capsys):
    log = StepLog()
    _rows(log, *[outcome(1.0)] * RECENT, outcome(1.2))
    assert not capsys.readouterr().err
    _rows(log, outcome(1.4), first=60)
    assert "step 60: 1.400 bits per byte, after 1.000 usually" in capsys.readouterr().err


def test_a_few_steps_are_traced(tmp_path):
    with Profiler(tmp_path / "whole", start=10, steps=2) as profiler:
        for step in range(11, 16):
            profiler.before(step)
            profiler.after(step, jnp.ones(3) + step)
    with Profiler(tmp_path / "cut", start=0, steps=5) as profiler:
        profiler.before(3)
    with Profiler(tmp_path / "none", start=0, steps=0) as profiler:
        profiler.before(3)
        profiler.after(3, None)
    traces = [len(list((tmp_path / x).rglob("*.xplane.pb"))) for x in ("whole", "cut", "none")]
    assert traces == [1, 1, 0]
