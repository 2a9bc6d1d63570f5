"""Train a model that train_lm.py has trained on, on another text.

The new run has a directory of its own, and goes on where it stopped when the same command is given
again. The last line of output is one JSON object.
"""

import devices  # noqa: F401, I001  before JAX

import dataclasses
from pathlib import Path

import tyro
from errors import one_sentence_errors
from mesh import TRAINING
from parameters import carry_over, check_frozen
from train_config import TrainingConfig
from trained import load_trained, read_model_config
from training_run import complete, make_model

from gla_layers import LanguageModel, LanguageModelConfig


@dataclasses.dataclass(frozen=True)
class Config(TrainingConfig):
    """What to begin from, and what to change."""

    steps: int = 60
    """Updates of the parameters."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    from_run: Path = Path("runs", "tiny-gated_deltanet")
    """Where train_lm.py, or this script, has left a run."""
    attention_layers: tuple[int, ...] = ()
    """Layers, counted from 0, whose token mixers become softmax attention, with new parameters."""
    add_layers: int = 0
    """New layers after the last, of the mixers whose turn it is."""
    freeze: tuple[str, ...] = ()
    """Globs of parameters that stay as they are, as embed/* or layers/*/mlp/*."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.text:
            raise ValueError("text must name files to train on")
        if self.add_layers < 0:
            raise ValueError(f"add_layers must be at least 0, got {self.add_layers}")


def main() -> None:
    """Load, train, evaluate, sample, and print the result."""
    with one_sentence_errors(ValueError, OSError):
        config = tyro.cli(Config, description=__doc__)
        before = read_model_config(config.from_run)
        model_config = with_attention(deeper(before, config.add_layers), config.attention_layers)
        path = config.run_dir or config.from_run.with_name(f"{config.from_run.name}-finetuned")
        if path.resolve() == config.from_run.resolve():
            raise ValueError(f"run_dir must be another than from_run, got {path} for both")
    complete(config, model_config, path, lambda: load(config, model_config), frozen=config.freeze)


def deeper(config: LanguageModelConfig, added: int) -> LanguageModelConfig:
    """The architecture with more layers, whose mixers go on as they repeat."""
    return dataclasses.replace(config, num_layers=config.num_layers + added)


def with_attention(config: LanguageModelConfig, layers: tuple[int, ...]) -> LanguageModelConfig:
    """The architecture with attention in some layers.

    Raises:
        ValueError: there is no such layer, it has attention already, or it is named twice.
    """
    if len(set(layers)) < len(layers):
        raise ValueError(f"attention_layers must be different, got {layers}")
    mixers = list(config.layer_mixers)
    for layer in layers:
        if not 0 <= layer < len(mixers):
            raise ValueError(f"attention_layers must be from 0 to {len(mixers) - 1}, got {layer}")
        if mixers[layer] == "attention":
            raise ValueError(f"attention_layers must have other mixers, but {layer} has attention")
        mixers[layer] = "attention"
    return dataclasses.replace(config, mixers=tuple(mixers))


def load(config: Config, model_config: LanguageModelConfig) -> LanguageModel:
    """The model with the old run's parameters; what became of them is printed."""
    model = make_model(config, model_config)
    check_frozen(model, config.freeze)
    old, step = load_trained(config.from_run, TRAINING)
    added = range(len(old.layers), len(model.layers))
    replaced = [f"layers/{layer}/mixer/*" for layer in config.attention_layers]
    replaced += [f"layers/{layer}/*" for layer in added]
    print(f"from step {step} of {config.from_run}")
    print(carry_over(old, model, replaced))
    return model


if __name__ == "__main__":
    main()
