"""The training step on chunked ops against the reference, the schedule, and the evaluation."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import evaluation_rows
from flax import nnx
from interrupts import Interrupts
from loop import Schedule, bits_per_byte, train, train_step
from optimizer import make_optimizer
from profiling import Profiler
from step_log import Diverged

from gla_layers import LanguageModel, LanguageModelConfig

MIXERS = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 8},
    "kda": {"num_heads": 2, "head_dim": 8, "expand_v": 2},
    "simple_gla": {"num_heads": 2},
    "attention": {"num_heads": 2},
}


def make_model(mixers, implementation=None):
    """A model whose every gradient is well above rounding, which Adam's first step would show."""
    config = LanguageModelConfig(
        vocab_size=257,
        hidden_size=16,
        num_layers=len(mixers),
        intermediate_size=16,
        mixers=mixers,
        mixer_options=MIXERS,
    )
    return LanguageModel(
        config,
        kernel_init=nnx.initializers.normal(0.3),
        implementation=implementation,
        rngs=nnx.Rngs(0),
    )


def make_optimizer_of(model):
    transformation = make_optimizer(
        learning_rate=1e-3,
        warmup_steps=0,
        steps=10,
        weight_decay=0.1,
        clip_norm=1.0,
        accumulate=1,
    )
    return nnx.Optimizer(model, transformation, wrt=nnx.Param)


def batch(length):
    """Two rows of two and three documents, whose boundaries lie inside the ops' chunks."""
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, 256)
    starts = jnp.array([[0, 70, 70], [0, 9, 140]])
    return tokens, jnp.sum(jnp.arange(length)[None, :, None] >= starts[:, None], axis=-1)


def assert_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixers",
    [("gated_deltanet",), ("kda",), ("simple_gla",), ("gated_deltanet", "attention")],
    ids="-".join,
)
def test_a_step_on_chunked_ops_is_the_reference_step(mixers):
    tokens, segment_ids = batch(161)
    results = []
    for implementation in ("xla", "reference"):
        model = make_model(mixers, implementation)
        outcome = train_step(model, make_optimizer_of(model), tokens, segment_ids)
        results.append((outcome, nnx.state(model, nnx.Param)))
    assert_close(*results, 1e-5)


def test_bits_per_byte_is_the_mean_whatever_the_batch():
    model = make_model(("attention",))
    rows = evaluation_rows([b"some text", b"more of it, and longer", b"x"], 8)
    losses, is_target = model.token_losses(*map(jnp.asarray, rows[:1]), segment_ids=rows[1])
    assert is_target.sum() == 32
    expected = float(losses.sum()) / 32 / np.log(2)
    for batch_size in (1, 4):
        np.testing.assert_allclose(bits_per_byte(model, rows, batch_size), expected, rtol=1e-5)


class Recorder:
    """In place of checkpoints and metrics: what was saved and written, in order."""

    def __init__(self):
        self.events = []

    def save(self, step, training, held_out):
        self.events.append(("save", step))

    def write(self, rows):
        self.events += [("write", row["step"], "eval_bits_per_byte" in row) for row in rows]


def run(schedule, *, start=0, interrupt_after=None, evaluation=1.0):
    """Train on nothing but numbers; what was recorded, and the last step."""
    recorder, interrupts, steps = Recorder(), Interrupts(), iter(range(start + 1, 100))

    def data():
        for step in steps:
            if step == interrupt_after:
                interrupts.received = 15
            yield {"tokens": np.zeros((1, 3)), "segment_ids": np.ones((1, 3))}

    training = types.SimpleNamespace(model=None, optimizer=None, data=data())
    last = train(
        training,
        start=start,
        schedule=schedule,
        evaluate=lambda model: evaluation,
        checkpoints=recorder,
        metrics=recorder,
        interrupts=interrupts,
        profiler=Profiler(Path("profile"), start=start, steps=0),
    )
    return recorder.events, last


@pytest.fixture(autouse=True)
def no_training(request, monkeypatch):
    if "schedule" in request.node.name:
        outcome = {"loss": 0.5, "gradient_norm": 1.0}
        monkeypatch.setattr("loop.train_step", lambda *_, **__: outcome)


def test_schedule_writes_every_step_and_saves_after_it_is_written():
    events, last = run(
        Schedule(steps=7, accumulate=1, log_every=2, eval_every=5, checkpoint_every=3)
    )
    assert last == 7
    writes = [event[1] for event in events if event[0] == "write"]
    assert writes == [1, 2, 3, 4, 5, 6, 7]
    assert [event[1] for event in events if event[-1] is True] == [5, 7]
    assert [event[1] for event in events if event[0] == "save"] == [3, 6, 7]
    for step in (3, 6, 7):
        saved = events.index(("save", step))
        assert events[saved - 1][:2] == ("write", step)


def test_schedule_of_an_interrupted_run_ends_with_a_save():
    schedule = Schedule(steps=7, accumulate=1, log_every=10, eval_every=10, checkpoint_every=10)
    events, last = run(schedule, interrupt_after=4)
    assert last == 4
    assert events[-2:] == [("write", 4, False), ("save", 4)]


def test_schedule_stops_before_it_saves_a_run_that_diverged():
    schedule = Schedule(steps=3, accumulate=1, log_every=1, eval_every=1, checkpoint_every=1)
    with pytest.raises(Diverged, match="the held-out loss after step 1 is nan"):
        run(schedule, evaluation=np.nan)


def test_schedule_of_a_resumed_run_goes_on():
    schedule = Schedule(steps=6, accumulate=1, log_every=4, eval_every=10, checkpoint_every=10)
    events, _ = run(schedule, start=4)
    assert events == [("write", 5, False), ("write", 6, True), ("save", 6)]
    assert run(schedule, start=6) == ([], 6)
