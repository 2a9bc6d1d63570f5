"""A training run from its first step to its report, whatever its parameters begin from.

A run lives in a directory, and goes on where it stopped when the same command is given again,
whatever stopped it. SIGTERM and Ctrl-C stop it after the step at hand, saved, with exit code 128
plus the signal's number.
"""

import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from baselines import gzip_bits_per_byte, unigram_bits_per_byte
from checkpoints import Checkpoints, NotReadable, NotSaved, Training
from data import (
    DOCUMENT_MARK,
    Text,
    decode,
    encode,
    evaluation_rows,
    load_text,
    training_stream,
)
from errors import one_sentence_errors
from flax import nnx
from interrupts import Interrupts
from jax.sharding import Mesh
from loop import Schedule, bits_per_byte, train
from mesh import SAMPLING, TRAINING, batch_sharding, check_divides, create, make_mesh
from metrics import Metrics, Row, plot_loss
from optimizer import freeze, make_optimizer
from processes import first_alone, is_first, join, own_directory
from profiling import Profiler
from run_directory import RunDirectory
from sampling import Sampling, generate
from step_log import Diverged
from throughput import peak_tokens_per_second
from train_config import TrainingConfig

from gla_layers import LanguageModel, LanguageModelConfig, ShardingConfig

MAY_CHANGE = frozenset(
    {
        "text",  # what it holds may not: that has a digest
        "mesh",
        "distributed",
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "profile",
        "tensorboard",
        "prompt",
        "sample_bytes",
    }
)
"""What may differ when a run goes on, since the parameters do not depend on it."""


def complete(
    config: TrainingConfig,
    model_config: LanguageModelConfig,
    path: Path,
    first_model: Callable[[], LanguageModel],
    *,
    frozen: Sequence[str] = (),
) -> None:
    """Begin or go on with a run, and print a sample and, as the last line, the result in JSON.

    Args:
        config: the options.
        model_config: the architecture.
        path: the run's directory.
        first_model: makes the model before the first step.
        frozen: globs of the names of parameters that stay as they are.
    """
    with one_sentence_errors(ValueError, OSError):
        if config.distributed:
            join()
        mesh = make_mesh(config.mesh)
        check_divides(mesh, config.batch_size, config.sequence_length)
        text = load_text(config.text, config.held_out_bytes)
        with jax.set_mesh(mesh):
            # Sizes that do not divide are an error here, before anything is written.
            nnx.eval_shape(lambda: make_model(config, model_config))
        record = describe(config, model_config, text)
        run = RunDirectory(path, record, may_change=MAY_CHANGE)
        result = run.result
        with jax.set_mesh(mesh):
            training = None if result else begin(first_model(), config, text, frozen, mesh)
        first_alone(run.claim)
    if training is None:
        print(f"{path} holds a finished run; give another --run-dir to train anew")
    else:
        with jax.set_mesh(mesh):
            rows = train_or_stop(training, config, text, path)
            print(continue_prompt(training.model, config, model_config))
            result = report(training.model, text, rows, path)
        if is_first():
            with one_sentence_errors(OSError):
                run.finish(result)
    print(json.dumps(result))


def make_model(
    config: TrainingConfig, model_config: LanguageModelConfig, sharding: ShardingConfig = TRAINING
) -> LanguageModel:
    """The model with random parameters, on the mesh in context."""
    return create(
        lambda: LanguageModel(
            model_config,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            sharding=sharding,
            implementation=config.implementation,
            rngs=nnx.Rngs(config.seed),
        )
    )


def begin(
    model: LanguageModel, config: TrainingConfig, text: Text, frozen: Sequence[str], mesh: Mesh
) -> Training[LanguageModel]:
    """The run before its first step."""
    optimizer = make_optimizer(
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup * config.steps),
        steps=config.steps,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        accumulate=config.accumulate,
    )
    if frozen:
        optimizer = freeze(optimizer, frozen)
    data = training_stream(
        text.training,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        sharding=batch_sharding(mesh),
    )
    return Training(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param), data)


def train_or_stop(
    training: Training[LanguageModel], config: TrainingConfig, text: Text, path: Path
) -> list[Row]:
    """Train from the newest checkpoint to the end, and return a row of metrics for every step.

    On SIGTERM or Ctrl-C the program ends here, with what it has saved.
    """
    evaluate = functools.partial(
        bits_per_byte,
        rows=evaluation_rows(text.held_out, config.sequence_length),
        batch_size=config.batch_size,
    )
    schedule = Schedule(
        config.steps,
        config.accumulate,
        config.log_every,
        config.eval_every,
        config.checkpoint_every,
    )
    with (
        one_sentence_errors(NotSaved, NotReadable, OSError),
        own_directory(path) as records,
        Interrupts() as interrupts,
        Checkpoints(path / "checkpoints", keep=config.keep_checkpoints) as checkpoints,
    ):
        tensorboard = records / "tensorboard" if config.tensorboard else None
        with one_sentence_errors(ValueError):
            start = checkpoints.restore(training)
            metrics = Metrics(records / "metrics.jsonl", last_step=start, tensorboard=tensorboard)
        if start and is_first():
            print(f"going on from step {start} of {path}", file=sys.stderr)
        profiler = Profiler(records / "profile", start=start, steps=config.profile)
        with metrics, profiler, one_sentence_errors(Diverged):
            last_step = train(
                training,
                start=start,
                schedule=schedule,
                evaluate=evaluate,
                checkpoints=checkpoints,
                metrics=metrics,
                interrupts=interrupts,
                profiler=profiler,
                peak_tokens_per_second=peak_tokens_per_second(
                    training.model, config.sequence_length
                ),
            )
        rows = metrics.rows
        if start == config.steps:
            # Killed before its report; the record, which may be lost, is the first process's.
            rows.append({"step": start, "eval_bits_per_byte": evaluate(training.model)})
        plot_loss(rows, records / "loss.png")
    if interrupts.received is not None and last_step < config.steps:
        print(f"stopped by {interrupts.received.name}; step {last_step} is saved in {path}")
        sys.exit(128 + interrupts.received)
    return rows


def report(model: LanguageModel, text: Text, rows: Sequence[Row], path: Path) -> dict[str, Any]:
    """The outcome of a finished run."""
    speed: dict[str, float] = {
        name: statistics.median(row[name] for row in rows if name in row)
        for name in ("tokens_per_second", "mfu")
        if any(name in row for row in rows)
    }
    return {
        "final_step": rows[-1]["step"],
        "eval_bits_per_byte": rows[-1]["eval_bits_per_byte"],
        "unigram_bits_per_byte": unigram_bits_per_byte(text.training, text.held_out),
        "gzip_bits_per_byte": gzip_bits_per_byte(text.held_out),
        **speed,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "run_dir": str(path),
    }


def describe(
    config: TrainingConfig, model_config: LanguageModelConfig, text: Text
) -> dict[str, Any]:
    """All that a run depends on, of JSON types."""
    record = dataclasses.asdict(config)
    del record["run_dir"]
    record["model"] = dataclasses.asdict(model_config)
    record["text_sha256"] = text.sha256
    return json.loads(json.dumps(record, default=_plain))


def continue_prompt(
    model: LanguageModel, config: TrainingConfig, model_config: LanguageModelConfig
) -> str:
    """The prompt, and what the model makes of it."""
    prompt = encode(config.prompt)
    sampler = nnx.eval_shape(lambda: make_model(config, model_config, SAMPLING))
    nnx.update(sampler, nnx.state(model))
    (tokens,) = generate(
        sampler,
        [prompt],
        jax.random.key(config.seed),
        max_new_tokens=config.sample_bytes,
        stop_token=DOCUMENT_MARK,
        sampling=Sampling(),
    )
    return decode([*prompt, *tokens.tolist()])


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else dict(value)
