"""The page says where things are, and imports go down as its picture does."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
FLOORS = ("kernels/tpu", "kernels/xla", "kernels", "gla_layers", "gla_layers/convert", "examples")
"""From the ground up; a folder's own files, not those of folders in it."""
STANDS_ON = {
    "kernels/tpu": {"kernels/xla", "kernels"},  # one_token differentiates the plain form
    "kernels/xla": {"kernels"},
    "kernels": {"kernels/tpu", "kernels/xla"},
    "gla_layers": {"kernels"},
    "gla_layers/convert": {"gla_layers"},
    "examples": {"gla_layers"},
}
BELOW_IMPLEMENTATIONS = {"implementation.py", "numerics.py", "packing.py"}
"""What kernels/xla and kernels/tpu may use of kernels/."""


def imported(path: pathlib.Path):
    """The files and packages of this repository, or other names, that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                target = folder.joinpath(*name.split("."))
                if target.relative_to(ROOT).parts[:2] == ("gla_layers", "kernels"):
                    target = ROOT.joinpath(*target.relative_to(ROOT).parts[1:])
                yield str(target.relative_to(ROOT))


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_go_down(folder):
    allowed = STANDS_ON[folder] | {folder}
    for path in (ROOT / folder).glob("*.py"):
        for name in imported(path):
            if folder.startswith("kernels"):
                assert not name.startswith(("flax", "gla_layers")), f"{path} imports {name}"
            elif folder.startswith("gla_layers"):
                assert not name.startswith(("examples", "optax", "orbax")), f"{path} imports {name}"
            if "/" not in name:
                continue
            home = str(pathlib.PurePath(name).parent)
            if (ROOT / name).is_dir():
                home = name
            assert home in allowed, f"{path} imports {name}"
            if folder in ("kernels/xla", "kernels/tpu") and home == "kernels":
                assert f"{pathlib.PurePath(name).name}.py" in BELOW_IMPLEMENTATIONS, (
                    f"{path} imports {name}"
                )


def test_files_that_the_page_names_exist():
    named = set(
        re.findall(r"`((?:docs|examples|gla_layers|kernels|tests|benchmarks)/[^`]*)`", PAGE)
    )
    named |= set(re.findall(r"\]\(([^)]*)\)", PAGE))
    assert len(named) > 15
    assert {name for name in named if not (ROOT / name).exists()} == set()
