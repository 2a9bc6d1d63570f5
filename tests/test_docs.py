"""The site: it builds without a warning, names every public object, and its code runs."""

import importlib
import itertools
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}


def run(page: str) -> dict:
    """Run the blocks of a page, one after the other, and return the names that they define."""
    names = {"__name__": page}
    for block in BLOCK.finditer(PAGES[page]):
        lines_before = PAGES[page].count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], DOCS / page, "exec"), names)
    return names


def python(*arguments: str | pathlib.Path) -> None:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_builds_without_a_warning(tmp_path):
    python("-m", "sphinx", "-q", "--fail-on-warning", "--keep-going", DOCS, tmp_path)


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("api/layers.md", "gla_layers"),
        ("api/kernels.md", "gla_layers.kernels"),
        ("api/convert.md", "gla_layers.convert"),
    ],
)
def test_every_export_is_in_the_reference(page, module):
    documented = re.findall(r"^\.\. auto(?:class|function):: (\w+)$", PAGES[page], re.MULTILINE)
    assert sorted(documented) == sorted(importlib.import_module(module).__all__)


def test_pictures_are_those_of_the_script(tmp_path):
    python(DOCS / "pictures.py", "--folder", tmp_path)
    drawn, committed = (
        {path.name: path.read_text() for path in folder.iterdir()}
        for folder in (tmp_path, DOCS / "pictures")
    )
    assert drawn == committed


def test_files_that_pages_name_exist():
    folders = "benchmarks|docs|examples|gla_layers|kernels|tests"
    named = {
        path for text in PAGES.values() for path in re.findall(rf"`((?:{folders})/[^`]*)`", text)
    }
    # "Add a recurrence" shows the layer that GLA would have.
    assert {path for path in named if not (ROOT / path).exists()} == {"gla_layers/gla.py"}


CHECKED = {"guides/finetune.md", "guides/remat.md", "mathematics.md"}
"""Pages whose code tests of their own run."""


@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if BLOCK.search(text) and page not in CHECKED]
)
def test_code(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


def test_a_state_holds_what_the_page_prints(capsys):
    run("mathematics.md")
    assert capsys.readouterr().out in PAGES["mathematics.md"]


def test_fine_tuning_trains_what_the_page_says():
    names = run("guides/finetune.md")
    model, old, new = names["model"], names["old"], names["new"]
    trained = {path[-2:] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    assert trained == set(itertools.product(("q_proj", "v_proj"), ("lora_a", "lora_b")))
    assert np.array_equal(model.embed.embedding, old.embed.embedding)
    kernels = [x.layers[0].mixer.o_proj.kernel for x in (model, old, new)]
    assert not np.array_equal(kernels[0], kernels[1])
    assert np.array_equal(kernels[1], kernels[2])


def test_the_policy_keeps_what_the_op_reads(capsys):
    names = run("guides/remat.md")
    lines = capsys.readouterr().out.splitlines()
    named = {line.split("'")[1]: line.split()[0] for line in lines if " named " in line}
    assert named == {
        "chunk_gated_delta_rule_states": "f32[2,2,1,8,16]",
        "chunk_gated_delta_rule_inverse": "f32[2,2,1,128,128]",
        "chunk_gated_delta_rule_x": "f32[2,2,1,128,16]",
    }
    shapes = {x.shape for x in jax.tree.leaves((nnx.state(names["layer"]), names["x"]))}
    held = {line.split()[0] for line in lines if line.startswith("f32")}
    assert held == set(named.values()) | {f"f32[{','.join(map(str, shape))}]" for shape in shapes}
