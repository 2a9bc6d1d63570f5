"""The training loop, and the held-out loss."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import Checkpoints, Training
from data import Rows
from flax import nnx
from interrupts import Interrupts
from jaxtyping import Array, Float, Int
from metrics import Metrics, Row
from processes import is_first
from tqdm import tqdm

from gla_layers import LanguageModel


class Diverged(Exception):
    """The loss is no number any more."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What happens when, counted in updates of the parameters.

    Attributes:
        steps: updates in all.
        accumulate: batches an update.
        log_every: updates between two looks at the losses, for which the device is waited for.
        eval_every: updates between two evaluations.
        checkpoint_every: updates between two checkpoints.
    """

    steps: int
    accumulate: int
    log_every: int
    eval_every: int
    checkpoint_every: int

    def is_due(self, step: int, every: int) -> bool:
        """Whether what happens every so many steps, and at the end, happens at `step`."""
        return step % every == 0 or step == self.steps


def train(
    training: Training,
    *,
    start: int,
    schedule: Schedule,
    evaluate: Callable[[LanguageModel], float],
    checkpoints: Checkpoints,
    metrics: Metrics,
    interrupts: Interrupts,
) -> int:
    """Train from step `start` to the end, or until interrupted.

    A checkpoint is written at intervals, at the end and on an interrupt, always after the metrics
    of the steps before it.

    Returns:
        The last step taken, which is saved.

    Raises:
        Diverged: nothing since the loss was a number is saved.
    """
    pending = PendingLosses()
    bar = {"total": schedule.steps, "initial": start, "disable": not is_first()}
    with tqdm(**bar, unit="step") as progress:
        for step in range(start + 1, schedule.steps + 1):
            for _ in range(schedule.accumulate):
                batch = next(training.data)
                loss = train_step(training.model, training.optimizer, **batch)
                num_rows, length = batch["tokens"].shape
                pending.add(step, loss, num_rows * (length - 1))
            evaluates = schedule.is_due(step, schedule.eval_every)
            saves = schedule.is_due(step, schedule.checkpoint_every)
            # The first step compiles, and is timed by itself.
            first = step == start + 1
            looks = first or evaluates or saves or schedule.is_due(step, schedule.log_every)
            # To hear of other processes is to wait for the devices.
            interrupted = (looks or jax.process_count() == 1) and interrupts.agreed()
            if not (looks or interrupted):
                continue
            rows = pending.rows()
            if evaluates:
                rows[-1]["eval_bits_per_byte"] = evaluate(training.model)
            metrics.write(rows)
            progress.update(len(rows))
            progress.set_postfix(
                bits_per_byte=f"{rows[-1]['bits_per_byte']:.3f}",
                tokens_per_second=f"{rows[-1]['tokens_per_second']:.0f}",
            )
            if saves or interrupted:
                checkpoints.save(step, training)
            if interrupted:
                return step
            pending = PendingLosses()
    return schedule.steps


class PendingLosses:
    """Losses that may still be under way on the device, so that it is not waited for each step."""

    def __init__(self) -> None:
        self._losses: dict[int, list[jax.Array]] = {}
        self._num_tokens = 0
        self._began = time.perf_counter()

    def add(self, step: int, loss: jax.Array, num_tokens: int) -> None:
        """Note one batch's loss in nats; a step may have several."""
        self._losses.setdefault(step, []).append(loss)
        self._num_tokens += num_tokens

    def rows(self) -> list[Row]:
        """Wait for the losses; a row of metrics for each step."""
        bits = {step: np.mean(losses) / math.log(2) for step, losses in self._losses.items()}
        for step, mean in bits.items():
            if not math.isfinite(mean):
                raise Diverged(f"the loss of step {step} is {mean}; try a lower learning_rate")
        speed = self._num_tokens / (time.perf_counter() - self._began)
        return [
            {"step": step, "bits_per_byte": float(mean), "tokens_per_second": speed}
            for step, mean in bits.items()
        ]


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(
    model: LanguageModel,
    optimizer: nnx.Optimizer,
    tokens: Int[Array, "B T+1"],
    segment_ids: Int[Array, "B T+1"],
) -> Float[Array, ""]:
    """Update the model and the optimizer in place, and return the loss before that, in nats."""

    def loss(model: LanguageModel) -> Float[Array, ""]:
        return model.loss(tokens, segment_ids=segment_ids)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def bits_per_byte(model: LanguageModel, rows: Rows, batch_size: int) -> float:
    """Mean loss over all the targets of `rows`, in bits."""
    tokens, segment_ids = rows
    padding = ((0, -len(tokens) % batch_size), (0, 0))
    tokens, segment_ids = np.pad(tokens, padding), np.pad(segment_ids, padding)
    total, count = 0.0, 0
    for i in range(0, len(tokens), batch_size):
        batch = slice(i, i + batch_size)
        loss, targets = _sum_of_losses(model, tokens[batch], segment_ids[batch])
        total += float(loss)
        count += int(targets)
    return total / count / math.log(2)


@nnx.jit
def _sum_of_losses(model, tokens, segment_ids):
    losses, is_target = model.token_losses(tokens, segment_ids=segment_ids)
    return jnp.sum(losses), jnp.sum(is_target)
