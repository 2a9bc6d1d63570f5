"""Checkpoints made by hand."""

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write(
    folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> pathlib.Path:
    """A new folder with a config and tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
