"""Train a language model.

A run lives in a directory, and goes on where it stopped when the same command is given again,
whatever stopped it. SIGTERM and Ctrl-C stop it after the step at hand, saved, with exit code 128
plus the signal's number. The last line of output is one JSON object.
"""

import devices  # noqa: F401, I001  before JAX

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from baselines import gzip_bits_per_byte, unigram_bits_per_byte
from checkpoints import Checkpoints
from data import (
    DOCUMENT_START,
    VOCAB_SIZE,
    decode,
    digest,
    evaluation_rows,
    hold_out_tail,
    load_documents,
    training_stream,
)
from flax import nnx
from interrupts import Interrupts
from loop import Schedule, bits_per_byte, train
from metrics import Metrics, plot_loss
from optimizer import make_optimizer
from run_directory import RunDirectory
from sampling import sample

from gla_layers import LanguageModel, LanguageModelConfig


Mixer = Literal["gated_deltanet", "kda", "simple_gla", "attention"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a language model on bytes of text."""

    preset: Literal["tiny", "340m", "1.3b"] = "tiny"
    """Size of the model, and defaults for the options below."""
    mixer: tuple[Mixer, ...] = ("gated_deltanet",)
    """Token mixers, repeated down the layers: several names make a hybrid."""
    text: tuple[str, ...] = ()
    """Files or globs, .jsonl with a "text" a line or plain text; Python's own manual by default."""
    held_out_bytes: int = 32768
    """The end of the text, which is not trained on and measures the model."""
    run_dir: Path | None = None
    """Where the run lives; runs/<preset>-<mixer> by default."""

    steps: int = 600
    """Updates of the parameters."""
    batch_size: int = 16
    """Rows a batch."""
    sequence_length: int = 256
    """Tokens a row."""
    accumulate: int = 1
    """Batches an update."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    warmup: float = 0.1
    """Fraction of the steps until the peak; a cosine leads from there to a tenth of it."""
    weight_decay: float = 0.1
    """Of the matrices."""
    clip_norm: float = 1.0
    """The most that the gradient's norm may be."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and optimizer are float32."""
    remat: bool = False
    """Make activations again in the backward pass, for memory."""
    implementation: Literal["pallas_tpu", "xla", "reference"] | None = None
    """Of the mixers' ops; the best for the platform by default."""
    seed: int = 0
    """Of parameters, order of the data, and sample."""

    log_every: int = 10
    """Updates between two looks at the loss."""
    eval_every: int = 100
    """Updates between two evaluations."""
    checkpoint_every: int = 100
    """Updates between two checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints that stay."""
    tensorboard: bool = False
    """Write TensorBoard's files as well."""
    prompt: str = "The "
    """What the sample at the end begins with."""
    sample_bytes: int = 300
    """Length of that sample."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (field.name != "seed"):
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")


PRESETS: Mapping[str, Config] = {
    "tiny": Config(),
    "340m": Config(
        preset="340m",
        steps=30_000,
        batch_size=32,
        accumulate=8,
        sequence_length=2048,
        learning_rate=1e-3,
        warmup=0.03,
        dtype="bfloat16",
        remat=True,
        eval_every=1000,
        checkpoint_every=1000,
    ),
    "1.3b": Config(
        preset="1.3b",
        steps=200_000,
        batch_size=16,
        accumulate=16,
        sequence_length=2048,
        learning_rate=4e-4,
        warmup=0.01,
        dtype="bfloat16",
        remat=True,
        eval_every=1000,
        checkpoint_every=1000,
    ),
}

MAY_CHANGE = frozenset(
    {
        "text",  # what it holds may not: that has a digest
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "tensorboard",
        "prompt",
        "sample_bytes",
    }
)
"""What may differ when a run goes on, since the parameters do not depend on it."""


def main() -> None:
    """Train, evaluate, sample, and print the result."""
    with one_sentence_errors():
        config = parse_command_line(sys.argv[1:])
        training_text, held_out = hold_out_tail(load_documents(config.text), config.held_out_bytes)
        model_config = LanguageModelConfig.preset(
            config.preset, vocab_size=VOCAB_SIZE, mixers=config.mixer
        )
        path = config.run_dir or Path("runs", "-".join((config.preset, *config.mixer)))
        record = describe(config, model_config, training_text, held_out)
        directory = RunDirectory(path, record, may_change=MAY_CHANGE)
        result = directory.result
    if result is not None:
        print(f"{path} holds a finished run; give another --run-dir to train anew")
        print(json.dumps(result))
        return

    with one_sentence_errors():
        model = LanguageModel(
            model_config,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            implementation=config.implementation,
            rngs=nnx.Rngs(config.seed),
        )
    steps = config.steps
    optimizer = nnx.Optimizer(
        model,
        make_optimizer(
            learning_rate=config.learning_rate,
            warmup_steps=round(config.warmup * steps),
            steps=steps,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            accumulate=config.accumulate,
        ),
        wrt=nnx.Param,
    )
    data = training_stream(
        training_text,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    rows = evaluation_rows(held_out, config.sequence_length)

    with (
        Interrupts() as interrupts,
        Checkpoints(path / "checkpoints", keep=config.keep_checkpoints) as checkpoints,
    ):
        with one_sentence_errors():
            start = checkpoints.restore(model, optimizer, data)
        with Metrics(
            path / "metrics.jsonl",
            last_step=start,
            tensorboard=path / "tensorboard" if config.tensorboard else None,
        ) as metrics:
            last_step = train(
                model,
                optimizer,
                data,
                start=start,
                schedule=Schedule(
                    steps,
                    config.accumulate,
                    config.log_every,
                    config.eval_every,
                    config.checkpoint_every,
                ),
                evaluate=lambda model: bits_per_byte(model, rows, config.batch_size),
                checkpoints=checkpoints,
                metrics=metrics,
                interrupts=interrupts,
            )
    plot_loss(metrics.rows, path / "loss.png")
    if last_step < steps:
        print(f"stopped by {interrupts.received.name} after step {last_step}, which is saved")
        sys.exit(128 + interrupts.received)

    print(continue_prompt(model, config))
    result = {
        "final_step": last_step,
        "eval_bits_per_byte": metrics.rows[-1]["eval_bits_per_byte"],
        "unigram_bits_per_byte": unigram_bits_per_byte(training_text, held_out),
        "gzip_bits_per_byte": gzip_bits_per_byte(held_out),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in metrics.rows),
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        "run_dir": str(path),
    }
    directory.finish(result)
    print(json.dumps(result))


def parse_command_line(arguments: Sequence[str]) -> Config:
    """The preset's config, with what the command line changes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    name = parser.parse_known_args(arguments)[0].preset
    return tyro.cli(
        Config, args=arguments, default=PRESETS.get(name, Config()), description=__doc__
    )


@contextlib.contextmanager
def one_sentence_errors() -> Iterator[None]:
    """What a user got wrong ends the program with a sentence, not with a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"train_lm.py: {error}")


def describe(
    config: Config,
    model_config: LanguageModelConfig,
    training_text: Sequence[bytes],
    held_out: Sequence[bytes],
) -> dict[str, Any]:
    """All that a run depends on, of JSON types."""
    record = dataclasses.asdict(config)
    del record["run_dir"]
    record["model"] = dataclasses.asdict(model_config)
    record["text_sha256"] = digest([*training_text, *held_out])
    return json.loads(json.dumps(record, default=dict))


def continue_prompt(model: LanguageModel, config: Config) -> str:
    """The prompt, and what the model makes of it."""
    tokens = jnp.array([[DOCUMENT_START, *config.prompt.encode()]])
    key = jax.random.key(config.seed)
    return config.prompt + decode(sample(model, tokens, key, num_tokens=config.sample_bytes)[0])


if __name__ == "__main__":
    main()
