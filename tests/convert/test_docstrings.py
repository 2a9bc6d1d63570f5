"""The examples in the package's docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import gla_layers.convert

MODULES = [module.name for module in pkgutil.iter_modules(gla_layers.convert.__path__)]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    failed, _ = doctest.testmod(importlib.import_module(f"gla_layers.convert.{module}"))
    assert failed == 0


def test_every_export_has_a_docstring():
    for name in gla_layers.convert.__all__:
        assert getattr(gla_layers.convert, name).__doc__
