"""The options of a training run, presets of them, and their command line."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import tyro
from checks import check_counts, check_positive, check_seed

Mixer = Literal["gated_deltanet", "kda", "simple_gla", "attention"]

COUNTS = (
    "held_out_bytes",
    "steps",
    "batch_size",
    "sequence_length",
    "accumulate",
    "log_every",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "sample_bytes",
)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """What every training run has, whatever its parameters begin from."""

    text: tuple[str, ...] = ()
    """Files or globs, .jsonl with a "text" a line or plain text; Python's own manual by default."""
    held_out_bytes: int = 32768
    """The end of the text, which is not trained on and measures the model."""
    run_dir: Path | None = None
    """Where the run lives; named after the model, below runs/, by default."""
    mesh: str | None = None
    """All devices, as data=2,fsdp=2,tensor=2,sequence=1 (any of these; one may be -1); only one
    device by default."""
    distributed: bool = False
    """This is one of several processes, which all get the same options: see processes.py."""

    steps: int = 240
    """Updates of the parameters."""
    batch_size: int = 8
    """Rows a batch."""
    sequence_length: int = 256
    """Tokens a row."""
    accumulate: int = 1
    """Batches an update."""
    learning_rate: float = 5e-3
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
    eval_every: int = 60
    """Updates between two evaluations."""
    checkpoint_every: int = 60
    """Updates between two checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay; the best one on the held-out text stays too."""
    profile: int = 0
    """Steps to trace for xprof, from the third on; see profile/ in the run's directory."""
    tensorboard: bool = False
    """Write TensorBoard's files as well."""
    prompt: str = "The "
    """What the sample at the end begins with."""
    sample_bytes: int = 300
    """Length of that sample."""

    def __post_init__(self) -> None:
        check_counts(self, *COUNTS)
        check_positive(self, "learning_rate", "clip_norm")
        if self.profile < 0:
            raise ValueError(f"profile must be at least 0, got {self.profile}")
        for name in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        check_seed(self)


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    """Train a language model on bytes of text."""

    preset: Literal["tiny", "100m", "340m", "1.3b"] = "tiny"
    """Size of the model, and defaults for the other options."""
    mixer: tuple[Mixer, ...] = ("gated_deltanet",)
    """Token mixers, repeated down the layers: several names make a hybrid."""


PRESETS: Mapping[str, Config] = {
    "tiny": Config(),
    "100m": Config(
        preset="100m",
        steps=10_000,
        batch_size=16,
        sequence_length=2048,
        learning_rate=2e-3,
        warmup=0.03,
        dtype="bfloat16",
        remat=True,
        eval_every=500,
        checkpoint_every=500,
    ),
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


def parse_command_line(arguments: Sequence[str], description: str | None) -> Config:
    """The preset's config, with what the command line changes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    name = parser.parse_known_args(arguments)[0].preset
    return tyro.cli(
        Config, args=arguments, default=PRESETS.get(name, Config()), description=description
    )
