"""Train a language model.

A run lives in a directory, and goes on where it stopped when the same command is given again,
whatever stopped it. SIGTERM and Ctrl-C stop it after the step at hand, saved, with exit code 128
plus the signal's number. The last line of output is one JSON object.
"""

import devices  # noqa: F401, I001  before JAX

import sys
from pathlib import Path

from data import VOCAB_SIZE
from errors import one_sentence_errors
from train_config import parse_command_line
from training_run import complete, make_model

from gla_layers import LanguageModelConfig


def main() -> None:
    """Train, evaluate, sample, and print the result."""
    with one_sentence_errors(ValueError):
        config = parse_command_line(sys.argv[1:], __doc__)
        model_config = LanguageModelConfig.preset(
            config.preset, vocab_size=VOCAB_SIZE, mixers=config.mixer
        )
    path = config.run_dir or Path("runs", "-".join((config.preset, *config.mixer)))
    complete(config, model_config, path, lambda: make_model(config, model_config))


if __name__ == "__main__":
    main()
