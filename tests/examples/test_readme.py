"""The commands and the code of the README, run with a model that compiles in a moment."""

import json
import re
import shlex
import sys
from pathlib import Path

import classify
import finetune
import generate
import jax
import numpy as np
import pytest
import recall
import train_lm
from flax import nnx

from gla_layers import LanguageModel, LanguageModelConfig, ShardingConfig, language_model_config
from tests.examples import small_train_lm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TRY = README.split("## Try it")[1].split("\n## ")[0]
SECTION = README.split("## Train on several devices")[1].split("\n## ")[0]
DEVICES = jax.devices()
SCRIPTS = {
    f"examples/{script.__name__}.py": script
    for script in (train_lm, generate, finetune, recall, classify)
}
SMALLER = "--steps 2 --sequence-length 32 --sample-bytes 2 --held-out-bytes 64"
SMALLER_OF = {
    "examples/train_lm.py": SMALLER,
    "examples/generate.py": "--max-new-tokens 2",
    "examples/finetune.py": SMALLER,
    "examples/recall.py": "--mixer simple_gla --steps 2 --eval-every 2 --head-dim 8",
    "examples/classify.py": "--steps 2 --batch-size 2 --document-bytes 31 --held-out-bytes 512",
}
HEADS = {"mixer_options": {"gated_deltanet": {"num_heads": 2, "head_dim": 8}}}


@pytest.mark.slow
def test_commands_to_try(tmp_path, monkeypatch, capsys):
    preset = small_train_lm.PRESETS["tiny"] | {"num_layers": 4}
    monkeypatch.setattr(language_model_config, "PRESETS", {"tiny": preset})
    for name in ("LICENSE", "docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", TRY, re.DOTALL)
    commands = re.findall(r"(examples/\S+\.py)(.*)", "".join(blocks).replace("\\\n", ""))
    for script, options in commands:
        arguments = [*shlex.split(options), *SMALLER_OF[script].split()]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        SCRIPTS[script].main()
    assert [script for script, _ in commands] == list(SMALLER_OF)


@pytest.mark.slow
def test_commands_for_simulated_devices(tmp_path, monkeypatch, capsys):
    preset = small_train_lm.PRESETS["tiny"] | HEADS | {"num_layers": 1}
    monkeypatch.setattr(language_model_config, "PRESETS", {"tiny": preset})
    (tmp_path / "LICENSE").symlink_to(ROOT / "LICENSE")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```sh\n(XLA_FLAGS.*?)```", SECTION, re.DOTALL)
    commands = block.replace("\\\n", "").strip().splitlines()
    for command in commands:
        flags, *_, script, options = re.fullmatch(r"(\S+) (.*?)(\S+\.py) (.*)", command).groups()
        count = int(flags.rpartition("=")[2])
        monkeypatch.setattr(jax, "devices", lambda count=count: DEVICES[:count])
        arguments = [*shlex.split(options), *SMALLER.split()]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        SCRIPTS[script].main()
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["final_step"] == 2
    assert len(commands) == 2


@pytest.mark.slow
def test_command_that_was_timed_on_a_gpu(tmp_path, monkeypatch, capsys):
    presets = dict.fromkeys(("tiny", "100m"), small_train_lm.PRESETS["tiny"])
    monkeypatch.setattr(language_model_config, "PRESETS", presets)
    monkeypatch.chdir(tmp_path)
    (options,) = re.findall(r"examples/train_lm\.py (--preset 100m .*?)```", README, re.DOTALL)
    license = str(ROOT / "LICENSE")
    options = options.replace("\\\n", "").replace("/usr/lib/python3.12/*.py", license)
    arguments = [*shlex.split(options), *SMALLER.split()]
    monkeypatch.setattr(sys, "argv", ["examples/train_lm.py", *arguments])
    train_lm.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["final_step"] == 2


@pytest.mark.slow
def test_a_training_loop_of_ones_own():
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    config = LanguageModelConfig(
        **small_train_lm.PRESETS["tiny"] | {"vocab_size": 64, "num_layers": 1} | HEADS
    )
    tokens = np.arange(4 * 9, dtype=np.int32).reshape(4, 9)
    names = {
        "LanguageModel": LanguageModel,
        "ShardingConfig": ShardingConfig,
        "config": config,
        "jax": jax,
        "nnx": nnx,
        "tokens": tokens,
    }
    exec(code, names)
    plain = LanguageModel(config, rngs=nnx.Rngs(0))
    assert np.allclose(names["loss"], plain.loss(tokens), atol=1e-5)
    for parameter, gradient in zip(
        *(jax.tree.leaves(nnx.state(names[name])) for name in ("model", "gradients")), strict=True
    ):
        assert gradient.sharding == parameter.sharding
