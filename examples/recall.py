"""Compare token mixers at recalling the last value that was given to a key.

Multi-query associative recall (MQAR; Arora et al., "Zoology", arXiv:2312.04927), where keys may be
given new values, as variables are. A document is

    k v k v ... k v  q q ... q

pairs of a key and a value, `writes` of them for each of N keys, in any order; then the N keys once
more, at each of which the model must name the key's last value. Only these tokens count. Everything
is drawn anew for every row, so that nothing can be learned by heart: what an answer needs must be
in the states of the mixers. Those of linear attention have one size for any number of pairs. A sum
of all of them, SimpleGLA's, holds a key's old values as well; a delta rule takes them out.

Every mixer trains in a model of the same shape on the same rows. The output is a table; the curves
are written to a JSON file and drawn.
"""

import devices  # noqa: F401, I001  before JAX

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from checks import check_counts, check_positive, check_seed
from errors import one_sentence_errors
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray
from optimizer import make_optimizer
from run_directory import write_json
from tqdm import tqdm
from train_config import Mixer

from gla_layers import KDA, GatedDeltaNet, LanguageModel, LanguageModelConfig, SimpleGLA

COUNTS = ("num_keys", "writes", "vocabulary", "num_heads", "num_layers", "steps", "eval_every")
PACKING = (1, 2, 4, 8)
"""Documents a row: with as many fewer keys each. Attention learns from the short ones first, and
without them not within thousands of steps."""

TEST_ROWS = 64

SLOWER = 4.0
"""By how much decay rates begin slower, in their logarithm: as the layers make them, up to 1 a
token (delta rules) and 1 in 23 (SimpleGLA), they forget within a row."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The task, the models, and how they are trained."""

    mixer: tuple[Mixer, ...] = ("gated_deltanet", "kda", "simple_gla", "attention")
    """Token mixers to compare."""
    num_keys: int = 8
    """Keys a row, a multiple of 8."""
    writes: int = 4
    """Values that a key is given, the last of which counts; 1 is the task of the paper."""
    vocabulary: int = 64
    """Keys to draw from; there are as many values."""
    head_dim: int = 32
    """Size of a key, and of a value, in a head."""
    num_heads: int = 1
    """Heads of a mixer; the model is as wide as they are together."""
    num_layers: int = 2
    """Layers of a model."""
    steps: int = 500
    """Updates of the parameters."""
    batch_size: int = 16
    """Rows a batch, a multiple of 4."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    eval_every: int = 50
    """Updates between two measurements."""
    seed: int = 0
    """Of parameters and rows."""
    out_dir: Path = Path("runs", "recall")
    """Where recall.json and recall.png are written."""

    def __post_init__(self) -> None:
        check_counts(self, *COUNTS)
        if not self.mixer or len(set(self.mixer)) < len(self.mixer):
            raise ValueError(f"mixer must be different names, got {self.mixer}")
        for name, factor in (
            ("num_keys", max(PACKING)),
            ("batch_size", len(PACKING)),
            ("head_dim", 2),
        ):
            size = getattr(self, name)
            if size < 1 or size % factor:
                raise ValueError(f"{name} must be a multiple of {factor}, got {size}")
        if self.head_dim > 256:
            raise ValueError(f"head_dim must be at most 256, got {self.head_dim}")
        if self.vocabulary < self.num_keys:
            raise ValueError(
                f"vocabulary must be at least num_keys = {self.num_keys}, got {self.vocabulary}"
            )
        check_positive(self, "learning_rate")
        check_seed(self)
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                "matplotlib must be installed to draw the curves: pip install matplotlib"
            )


Result = dict[str, Any]
"""`parameters`, their number, and `curve`: points with `step` and `accuracy`."""


def main() -> None:
    """Train the models one after the other; print and write what came of it."""
    with one_sentence_errors(ValueError, OSError):
        config = tyro.cli(Config, description=__doc__)
        config.out_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {mixer: train(config, mixer) for mixer in config.mixer}
    write_json(config.out_dir / "recall.json", results)
    plot(results, config.out_dir / "recall.png")
    print(table(results))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of packed documents; `answers` is -1 where no answer is due."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    answers: Int[Array, "B T"]


@functools.partial(jax.jit, static_argnames=("config", "batch_size"))
def draw_rows(key: PRNGKeyArray, config: Config, batch_size: int) -> Rows:
    """Rows of as many keys each, a part of them with each number of documents of `PACKING`."""
    part = batch_size // len(PACKING)
    parts = []
    for documents in PACKING:
        document_keys = jax.random.split(jax.random.fold_in(key, documents), (part, documents))
        draw = functools.partial(
            draw_document, config=config, num_keys=config.num_keys // documents
        )
        tokens, answers = jax.vmap(jax.vmap(draw))(document_keys)
        segment_ids = jnp.broadcast_to(jnp.arange(1, documents + 1)[:, None], tokens.shape)
        parts.append(Rows(*(x.reshape(part, -1) for x in (tokens, segment_ids, answers))))
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def draw_document(
    key: PRNGKeyArray, config: Config, num_keys: int
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Tokens, where values come after the keys in the vocabulary, and answers."""
    key_names, key_order, key_values, key_queries = jax.random.split(key, 4)
    names = jax.random.choice(key_names, config.vocabulary, (num_keys,), replace=False)
    written = jax.random.permutation(key_order, jnp.tile(jnp.arange(num_keys), config.writes))
    values = jax.random.randint(key_values, written.shape, 0, config.vocabulary) + config.vocabulary
    last_write = jnp.zeros(num_keys, int).at[written].max(jnp.arange(written.size))
    queried = jax.random.permutation(key_queries, num_keys)
    pairs = jnp.stack([names[written], values], axis=1).ravel()
    tokens = jnp.concatenate([pairs, names[queried]])
    answers = jnp.concatenate([jnp.full(pairs.shape, -1), values[last_write[queried]]])
    return tokens, answers


def make_model(config: Config, mixer: Mixer) -> LanguageModel:
    """A model whose heads are of the same number and size with every mixer."""
    hidden_size = config.num_heads * config.head_dim
    heads = {"num_heads": config.num_heads}
    sized_heads = {**heads, "head_dim": config.head_dim}
    model_config = LanguageModelConfig(
        vocab_size=2 * config.vocabulary,
        hidden_size=hidden_size,
        num_layers=config.num_layers,
        intermediate_size=2 * hidden_size,
        mixers=(mixer,),
        mixer_options={
            "gated_deltanet": {**sized_heads, "expand_v": 1},
            "kda": sized_heads,
            "simple_gla": heads,
            # The others norm keys or outputs; without it attention hardly leaves the mean.
            "attention": {**heads, "qk_norm": "per_head"},
        },
    )
    model = LanguageModel(model_config, rngs=nnx.Rngs(config.seed))
    for layer in model.layers:
        if isinstance(layer.mixer, GatedDeltaNet | KDA):
            layer.mixer.A_log[...] -= SLOWER
        elif isinstance(layer.mixer, SimpleGLA):
            bias = layer.mixer.gk_proj.bias
            assert bias is not None
            bias[...] += SLOWER
    return model


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, rows: Rows) -> None:
    """Update the model and the optimizer in place."""

    def loss(model: LanguageModel) -> Float[Array, ""]:
        logits = model(rows.tokens, segment_ids=rows.segment_ids)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.answers)
        return jnp.mean(losses, where=rows.answers >= 0)

    optimizer.update(model, nnx.grad(loss)(model))


@nnx.jit
def measure(model: LanguageModel, rows: Rows) -> Float[Array, ""]:
    """The fraction of right answers."""
    said = jnp.argmax(model(rows.tokens, segment_ids=rows.segment_ids), axis=-1)
    return jnp.mean(said == rows.answers, where=rows.answers >= 0)


def train(config: Config, mixer: Mixer) -> Result:
    """Train a model and measure it on the way."""
    model = make_model(config, mixer)
    optimizer = make_optimizer(
        learning_rate=config.learning_rate,
        warmup_steps=config.steps // 10,
        steps=config.steps,
    )
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    training_key, test_key = jax.random.split(jax.random.key(config.seed))
    test_rows = draw_rows(test_key, config, TEST_ROWS * len(PACKING))
    # Of the first part, whose rows are one document, with all of the keys.
    test_rows = jax.tree.map(lambda array: array[:TEST_ROWS], test_rows)
    curve = []
    with tqdm(total=config.steps, desc=mixer, unit="step") as progress:
        for step in range(1, config.steps + 1):
            key = jax.random.fold_in(training_key, step)
            train_step(model, optimizer, draw_rows(key, config, config.batch_size))
            if step % config.eval_every == 0 or step == config.steps:
                accuracy = float(measure(model, test_rows))
                curve.append({"step": step, "accuracy": accuracy})
                progress.update(step - progress.n)
                progress.set_postfix(accuracy=f"{accuracy:.3f}")
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return {"parameters": parameters, "curve": curve}


def table(results: Mapping[str, Result]) -> str:
    """The results in Markdown."""
    lines = ["| mixer | parameters | accuracy |", "|---|---|---|"]
    for mixer, result in results.items():
        accuracy = result["curve"][-1]["accuracy"]
        lines.append(f"| {mixer} | {result['parameters']} | {accuracy:.3f} |")
    return "\n".join(lines)


def plot(results: Mapping[str, Result], path: Path) -> None:
    """Draw the accuracies over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for mixer, result in results.items():
        points = [(point["step"], point["accuracy"]) for point in result["curve"]]
        axes.plot(*zip(*points, strict=True), label=mixer)
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
