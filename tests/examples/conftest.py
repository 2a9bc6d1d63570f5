"""The examples are scripts: their folder is where they find each other."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

TRAIN = (
    "--mixer simple_gla attention --steps 2 --batch-size 2 --sequence-length 16 "
    "--held-out-bytes 512 --sample-bytes 12 --seed 5 --run-dir"
)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The directory of a finished run of the training script, of two small layers."""
    import train_lm

    from gla_layers import language_model_config
    from tests.examples import small_train_lm

    path = tmp_path_factory.mktemp("runs") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model_config, "PRESETS", small_train_lm.PRESETS)
        patch.setattr(sys, "argv", ["train_lm.py", *TRAIN.split(), str(path)])
        train_lm.main()
    return path
