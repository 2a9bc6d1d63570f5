"""The wheel: what it holds, and that it works outside the checkout."""

import os
import pathlib
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]

TYPED_PROGRAM = """
from typing import assert_type

import jax
import jax.numpy as jnp
from flax import nnx

from gla_layers import KDA, GatedDeltaNet, LanguageModel, LanguageModelConfig, LinearAttentionState
from gla_layers.convert import load_pretrained
from gla_layers.kernels import chunk_simple_gla


class Mixers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kda = KDA(64, num_heads=2, head_dim=32, dtype=jnp.bfloat16, rngs=rngs)
        self.gdn = GatedDeltaNet(64, num_heads=2, precision="highest", dtype="bfloat16", rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.gdn(self.kda(x))


x = jnp.ones((1, 3, 64))
kda = Mixers(nnx.Rngs(0)).kda
assert_type(kda(x), jax.Array)
assert_type(kda(x, state=kda.init_state(1)), tuple[jax.Array, LinearAttentionState])
model = LanguageModel(LanguageModelConfig.preset("tiny"), rngs=nnx.Rngs(0))
assert_type(model(jnp.zeros((1, 3), int)), jax.Array)
heads = x[:, :, None]
assert_type(chunk_simple_gla(heads, heads, heads), tuple[jax.Array, jax.Array | None])
assert_type(load_pretrained("checkpoint"), LanguageModel)
chunk_simple_gla(heads, heads)  # type: ignore[call-arg]
KDA(64, num_heads="2", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
"""


def test_every_subpackage_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = set()
    for folder, name in (("gla_layers", "gla_layers"), ("kernels", "gla_layers.kernels")):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *parts)))
    assert set(listed) == found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_one_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert len(top) == 2
    assert "gla_layers" in top, "and nothing else but its dist-info: no package named kernels"
    assert "gla_layers/py.typed" in names
    assert "gla_layers/kernels/reference.py" in names


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import gla_layers, gla_layers.kernels, jax.numpy as jnp\n"
        "x = jnp.ones((1, 3, 1, 8))\n"
        "o, _ = gla_layers.kernels.chunk_simple_gla(x, x, x)\n"
        "print(gla_layers.__file__, gla_layers.kernels.__file__, o.shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "", "JAX_PLATFORMS": "cpu"},
    )
    package, kernels, *shape = done.stdout.split(maxsplit=2)
    assert package.startswith(str(site))
    assert kernels.startswith(str(site))
    assert shape == ["(1, 3, 1, 8)\n"]


@pytest.mark.slow
def test_types_of_what_is_installed_and_of_a_program_that_uses_it(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (tmp_path / "program.py").write_text(TYPED_PROGRAM)
    config = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *config, "-p", "gla_layers", "-m", "program"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
