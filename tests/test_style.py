"""What a reader relies on: formatted code, examples in docstrings that run, no stray names."""

import doctest
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import gla_layers

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


OPS = [f"kernels.{module.name}" for module in pkgutil.iter_modules([str(ROOT / "kernels")])]
LAYERS = [module.name for module in pkgutil.iter_modules([str(ROOT / "gla_layers")])]
MODULES = ["gla_layers", *(f"gla_layers.{name}" for name in sorted(LAYERS + OPS))]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    failed, _ = doctest.testmod(
        importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0


def test_every_export_has_a_docstring():
    for module in (gla_layers, importlib.import_module("gla_layers.kernels")):
        for name in module.__all__:
            assert getattr(module, name).__doc__, f"{module.__name__}.{name} has no docstring"
