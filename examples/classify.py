"""Train a model that train_lm.py has trained to tell kinds of documents apart.

A linear head over the classes takes the place of the one over tokens, and reads the mean over the
tokens of each document: the last one has seen all of it, but what it holds is for the next byte.
The last line of output is one JSON object.
"""

import devices  # noqa: F401, I001  before JAX

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax
import tyro
from checks import check_counts, check_positive, check_seed
from data import DOCUMENT_MARK, load_text
from errors import one_sentence_errors
from flax import nnx
from jaxtyping import Array, Float, Int, Int32
from optimizer import freeze, make_optimizer
from parameters import carry_over, check_frozen
from sampling import pad_left
from tqdm import trange
from trained import load_trained, read_model_config

from gla_layers import LanguageModel

COUNTS = ("held_out_bytes", "document_bytes", "steps", "batch_size")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to begin from, what to tell apart, and how to train."""

    classes: tuple[str, ...]
    """Files or globs, one for each class, as for train_lm.py's --text."""
    from_run: Path = Path("runs", "tiny-gated_deltanet")
    """Where train_lm.py has left a run."""
    freeze: tuple[str, ...] = ()
    """Globs of parameters that stay as they are; embed/* layers/* trains little but the head."""
    held_out_bytes: int = 8192
    """The end of each class's text, which is not trained on and measures the model."""
    document_bytes: int = 255
    """Texts are cut into documents of this length, but for their ends; with its mark, a document of
    255 fills two chunks of 128 tokens."""
    steps: int = 100
    """Updates of the parameters."""
    batch_size: int = 16
    """Documents a batch."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and optimizer are float32."""
    seed: int = 0
    """Of the head's parameters and the order of the documents."""

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes must be at least 2 different globs, got {self.classes}")
        check_counts(self, *COUNTS)
        check_positive(self, "learning_rate")
        check_seed(self)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents as rows that end together, and the number of each one's class."""

    tokens: Int32[np.ndarray, "N T"]
    segment_ids: Int32[np.ndarray, "N T"]
    labels: Int32[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.labels)

    def take(
        self, rows: Int[np.ndarray, " B"]
    ) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"], Int32[Array, " B"]]:
        """Some of the documents."""
        tokens, segment_ids, labels = self.tokens[rows], self.segment_ids[rows], self.labels[rows]
        return jnp.asarray(tokens), jnp.asarray(segment_ids), jnp.asarray(labels)


class Classifier(nnx.Module):
    """The body of a language model, and a linear head over classes."""

    def __init__(self, body: LanguageModel, num_classes: int, *, rngs: nnx.Rngs):
        self.embed = body.embed
        self.layers = body.layers
        self.norm = body.norm
        self.head = nnx.Linear(body.config.hidden_size, num_classes, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B classes"]:
        """Logits of the classes, of documents that are padded left."""
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x, None, segment_ids)
        mean = jnp.mean(self.norm(x), axis=1, where=segment_ids[..., None] != 0)
        return self.head(mean).astype(jnp.float32)


def main() -> None:
    """Load, train, measure, and print the result."""
    with one_sentence_errors(ValueError, OSError):
        config = tyro.cli(Config, description=__doc__)
        training, held_out = load_documents(config)
        model, step = load(config)
    train(model, training, config)
    guess = np.bincount(training.labels).argmax()
    result = {
        "from_step": step,
        "final_step": config.steps,
        "documents": len(training),
        "held_out_documents": len(held_out),
        "accuracy": accuracy(model, held_out, config.batch_size),
        "accuracy_of_commonest_class": float(np.mean(held_out.labels == guess)),
    }
    print(json.dumps(result))


def load_documents(config: Config) -> tuple[Documents, Documents]:
    """The documents to train on, and those to measure with.

    Raises:
        ValueError: a class's text cannot be read, is too short, or is that of another.
    """
    texts = [
        load_text([pattern], config.held_out_bytes, option="classes") for pattern in config.classes
    ]
    if len({text.sha256 for text in texts}) < len(texts):
        raise ValueError(f"classes must have different texts, but two of {config.classes} do not")
    size = config.document_bytes
    return cut([text.training for text in texts], size), cut(
        [text.held_out for text in texts], size
    )


def cut(classes: Sequence[Sequence[bytes]], size: int) -> Documents:
    """Texts, class by class, as documents of at most `size` bytes."""
    rows, labels = [], []
    for label, texts in enumerate(classes):
        pieces = [text[i : i + size] for text in texts for i in range(0, len(text), size)]
        rows += [[DOCUMENT_MARK, *piece] for piece in pieces]
        labels += [label] * len(pieces)
    return Documents(*pad_left(rows), np.array(labels, np.int32))


def load(config: Config) -> tuple[Classifier, int]:
    """A classifier with the old run's parameters, what became of which is printed, and its step."""
    model_config = read_model_config(config.from_run)
    rngs = nnx.Rngs(config.seed)
    body = LanguageModel(model_config, dtype=jnp.dtype(config.dtype), rngs=rngs)
    model = Classifier(body, len(config.classes), rngs=rngs)
    if config.freeze:
        check_frozen(model, config.freeze)
    old, step = load_trained(config.from_run)
    print(f"from step {step} of {config.from_run}")
    print(carry_over(old, model, ["head/*"]))
    return model, step


def train(model: Classifier, documents: Documents, config: Config) -> None:
    """Update the model in place."""
    optimizer = make_optimizer(
        learning_rate=config.learning_rate,
        warmup_steps=config.steps // 10,
        steps=config.steps,
    )
    if config.freeze:
        optimizer = freeze(optimizer, config.freeze)
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    rng = np.random.default_rng(config.seed)
    # All classes are drawn alike, however much text there is of each.
    share = 1 / np.bincount(documents.labels)[documents.labels] / len(config.classes)
    with trange(config.steps, unit="step") as steps:
        for _ in steps:
            rows = rng.choice(len(documents), size=config.batch_size, p=share)
            loss = train_step(model, optimizer, *documents.take(rows))
            steps.set_postfix(loss=f"{float(loss):.3f}")


@nnx.jit(donate_argnums=(0, 1))
def train_step(
    model: Classifier,
    optimizer: nnx.Optimizer,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    labels: Int[Array, " B"],
) -> Float[Array, ""]:
    """Update the model and the optimizer in place, and return the loss before that, in nats."""

    def loss(model: Classifier) -> Float[Array, ""]:
        logits = model(tokens, segment_ids)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def accuracy(model: Classifier, documents: Documents, batch_size: int) -> float:
    """The fraction of documents whose class is the likeliest by the model."""
    right = 0
    for start in range(0, len(documents), batch_size):
        # The last batch is filled up, so that there is one program, with documents known.
        rows = np.arange(start, start + batch_size) % len(documents)
        tokens, segment_ids, labels = documents.take(rows)
        said = np.asarray(classify(model, tokens, segment_ids))
        right += int(np.sum((said == labels)[: len(documents) - start]))
    return right / len(documents)


@nnx.jit
def classify(
    model: Classifier, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Int[Array, " B"]:
    """The likeliest class of each document."""
    return jnp.argmax(model(tokens, segment_ids), axis=-1)


if __name__ == "__main__":
    main()
