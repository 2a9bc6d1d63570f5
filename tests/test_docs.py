"""The site: it builds without a warning, and the code of its pages runs."""

import pathlib
import re
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if BLOCK.search(text)])
def test_code_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)
