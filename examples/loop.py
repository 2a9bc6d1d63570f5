"""The training loop, and the held-out loss."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import Checkpoints, Training
from data import Rows
from flax import nnx
from interrupts import Interrupts
from jaxtyping import Array, Float, Int
from metrics import Metrics
from processes import is_first
from profiling import Profiler
from step_log import Diverged, StepLog
from tqdm import tqdm

from gla_layers import LanguageModel


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
    training: Training[LanguageModel],
    *,
    start: int,
    schedule: Schedule,
    evaluate: Callable[[LanguageModel], float],
    checkpoints: Checkpoints,
    metrics: Metrics,
    interrupts: Interrupts,
    profiler: Profiler,
    peak_tokens_per_second: float | None = None,
) -> int:
    """Train from step `start` to the end, or until interrupted.

    A checkpoint is written at intervals, at the end and on an interrupt, always after the metrics
    of the steps before it. `StepLog` says what the metrics are.

    Returns:
        The last step taken, which is saved.

    Raises:
        Diverged: gradients or the held-out loss are no numbers; the last checkpoint is older.
    """
    log = StepLog(peak_tokens_per_second)
    bar = {"total": schedule.steps, "initial": start, "disable": not is_first()}
    with tqdm(**bar, unit="step") as progress:
        for step in range(start + 1, schedule.steps + 1):
            profiler.before(step)
            for _ in range(schedule.accumulate):
                batch = next(training.data)
                outcome = train_step(training.model, training.optimizer, **batch)
                num_rows, length = batch["tokens"].shape
                log.add(step, outcome, num_rows * (length - 1))
            profiler.after(step, outcome)
            evaluates = schedule.is_due(step, schedule.eval_every)
            saves = schedule.is_due(step, schedule.checkpoint_every)
            # The first step compiles, and is timed by itself.
            first = step == start + 1
            looks = first or evaluates or saves or schedule.is_due(step, schedule.log_every)
            # To hear of other processes is to wait for the devices.
            interrupted = (looks or jax.process_count() == 1) and interrupts.agreed()
            if not (looks or interrupted):
                continue
            rows = log.rows()
            held_out = None
            if evaluates:
                held_out = rows[-1]["eval_bits_per_byte"] = evaluate(training.model)
                if not math.isfinite(held_out):
                    raise Diverged(f"the held-out loss after step {step} is {held_out}")
            metrics.write(rows)
            progress.update(len(rows))
            shown = ("bits_per_byte", "tokens_per_second", "mfu")
            progress.set_postfix(
                {name: f"{rows[-1][name]:.4g}" for name in shown if name in rows[-1]}
            )
            if saves or interrupted:
                checkpoints.save(step, training, held_out)
            if interrupted:
                return step
            log.restart()
    return schedule.steps


@nnx.jit(donate_argnums=(0, 1))
def train_step(
    model: LanguageModel,
    optimizer: nnx.Optimizer,
    tokens: Int[Array, "B T+1"],
    segment_ids: Int[Array, "B T+1"],
) -> dict[str, Float[Array, ""]]:
    """Update the model and the optimizer in place.

    Returns:
        The `loss` before that in nats, and the gradient's norm before it is clipped.
    """

    def loss(model: LanguageModel) -> Float[Array, ""]:
        return model.loss(tokens, segment_ids=segment_ids)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return {"loss": value, "gradient_norm": optax.tree.norm(gradients)}


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
