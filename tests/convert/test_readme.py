"""The README's example, run as it stands."""

import pathlib
import re

import numpy as np
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).parents[2]


def test_load_a_pretrained_checkpoint(tmp_path, monkeypatch):
    section = (ROOT / "README.md").read_text().split("## Load a pretrained checkpoint")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    (tmp_path / "checkpoint").symlink_to(ROOT / "tests" / "data" / "hf_qwen3_next_lm")
    monkeypatch.chdir(tmp_path)
    names = {"tokens": np.arange(12, dtype=np.int32)[None]}
    exec(code, names)
    assert names["logits"].shape == (1, 12, 300)
    written, original = (
        load_file(tmp_path / name / "model.safetensors") for name in ("finetuned", "checkpoint")
    )
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[name], original[name]) for name in original)
