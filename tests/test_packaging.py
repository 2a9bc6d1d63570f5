"""The wheel: what it holds, and that it works outside the checkout."""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

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

OPS = "tests/kernels/test_golden.py::test_chunked_in_float32"
GRADIENTS = "tests/layers/test_golden.py::test_outputs_and_gradients"
DECODING = "tests/layers/test_golden.py::test_decoding"
EXAMPLES = "tests/examples"
TESTS_OF_EVERY_PART = (
    *(f"{OPS}[{case}]" for case in ("gdn-xla-packed", "kda-xla-packed", "sgla-xla-packed")),
    f"{OPS}[gdn-pallas_tpu-T65]",
    *(f"{GRADIENTS}[{layer}_default-xla]" for layer in ("gdn", "kda", "sgla")),
    *(f"{DECODING}[{layer}_default]" for layer in ("gdn", "kda", "sgla")),
    "tests/convert/test_readme.py::test_load_a_pretrained_checkpoint",
    f"{EXAMPLES}/test_optimizer.py::test_only_matrices_decay",
    f"{EXAMPLES}/test_metrics.py::test_tensorboard_gets_the_same_numbers",
    f"{EXAMPLES}/test_checkpoints.py::test_a_fresh_process_gets_every_bit_back",
    # It samples from a run that the training script leaves.
    f"{EXAMPLES}/test_generate.py::test_prompts_go_on_for_as_long_as_asked",
)


def test_every_subpackage_is_listed():
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
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
def test_types_of_what_is_installed_and_of_programs_that_use_it(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (tmp_path / "program.py").write_text(TYPED_PROGRAM)
    # Benchmarks take their inputs from tests.
    for folder in ("benchmarks", "examples", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    config = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            *config,
            "gla_layers",
            "program.py",
            "benchmarks",
            "examples",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # Examples find each other in their folder.
        env=os.environ | {"MYPYPATH": f"{tmp_path}:{tmp_path / 'examples'}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{said}"


@pytest.mark.slow
def test_lowest_versions(wheel, tmp_path):
    """The wheel beside the lowest versions that it allows, by tests of every part."""
    uv = (sys.executable, "-m", "uv")
    python = tmp_path / "venv" / "bin" / "python"
    run(*uv, "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    # Lowest are what pyproject.toml itself names: what a wheel does is not direct. Outside of the
    # checkout uv does not know the constraints there.
    install = (*uv, "pip", "install", "--python", python, "--resolution", "lowest-direct")
    needed = ("-r", ROOT / "pyproject.toml", "--extra", "examples", "--extra", "convert")
    tools = PYPROJECT["project"]["optional-dependencies"]["test"]
    runners = [x for x in tools if x.startswith(("pytest>", "hypothesis>", "filelock>"))]
    run(*install, *needed, *runners, wheel, cwd=tmp_path)
    checkout = tmp_path / "without_the_package"
    for folder in ("examples", "tests"):
        shutil.copytree(ROOT / folder, checkout / folder)
    for file in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, checkout)
    compiled = ROOT / ".jax_cache"
    compiled.mkdir(exist_ok=True)
    (checkout / ".jax_cache").symlink_to(compiled)
    pytest_alone = (python, "-E", "-m", "pytest", "--override-ini", "addopts=")
    run(*pytest_alone, *TESTS_OF_EVERY_PART, cwd=checkout)
