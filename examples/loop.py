"""The training loop, and the held-out loss."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import grain
import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import Checkpoints
from data import Rows
from flax import nnx
from interrupts import Interrupts
from jaxtyping import Array, Float, Int
from metrics import Metrics
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


def train(
    model: LanguageModel,
    optimizer: nnx.Optimizer,
    data: grain.DatasetIterator,
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
    """
    losses: list[list[jax.Array]] = []
    began = time.perf_counter()
    with tqdm(total=schedule.steps, initial=start, unit="step") as bar:
        for step in range(start + 1, schedule.steps + 1):
            losses.append([])
            for _ in range(schedule.accumulate):
                batch = next(data)
                tokens, segment_ids = batch["tokens"], batch["tokens_segment_ids"]
                losses[-1].append(train_step(model, optimizer, tokens, segment_ids))

            stop = step == schedule.steps or interrupts.received is not None
            evaluates = step % schedule.eval_every == 0 or step == schedule.steps
            saves = step % schedule.checkpoint_every == 0 or stop
            # The first step, which compiles, is timed by itself.
            if not (step == start + 1 or step % schedule.log_every == 0 or evaluates or saves):
                continue
            bits = [float(np.mean(step_losses)) / math.log(2) for step_losses in losses]
            num_tokens = len(losses) * schedule.accumulate * tokens[:, 1:].size
            speed = num_tokens / (time.perf_counter() - began)
            rows = [
                {"step": step - len(bits) + i, "bits_per_byte": value, "tokens_per_second": speed}
                for i, value in enumerate(bits, start=1)
            ]
            if evaluates:
                rows[-1]["eval_bits_per_byte"] = evaluate(model)
            metrics.write(rows)
            bar.update(len(rows))
            bar.set_postfix(bits_per_byte=f"{bits[-1]:.3f}", tokens_per_second=f"{speed:.0f}")
            if saves:
                checkpoints.save(step, model, optimizer, data)
            if stop:
                return step
            losses = []
            began = time.perf_counter()
    return start


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
