"""`examples/train_lm.py` with a model that compiles in a moment, for tests in a process apart."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import processes
import train_lm

from gla_layers import language_model_config

PRESETS = {
    "tiny": {
        "vocab_size": 257,
        "hidden_size": 16,
        "num_layers": 2,
        "intermediate_size": 16,
        "mixer_options": {
            "attention": {"num_heads": 1},
            "gated_deltanet": {"num_heads": 1, "head_dim": 16},
            "kda": {"num_heads": 1, "head_dim": 16},
            "simple_gla": {"num_heads": 1},
        },
    }
}

if __name__ == "__main__":
    language_model_config.PRESETS = PRESETS
    processes.SECONDS_UNTIL_DEAD = 5
    train_lm.main()
