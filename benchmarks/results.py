"""Figures that are kept in `results/`, one file a table, and whether new ones fall behind them.

    python -m uv run python -m benchmarks.results --tables ops --where target=v6e case=GDN

counts again what is kept, and ends with an error if a figure has grown by more than a tenth.
`--save` of a table's own command, `benchmarks.ops` and so on, keeps what it counts.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
TABLES = ("ops", "layers", "decoding", "training_step", "scaling", "accuracy", "memory")
GROWTH = 1.1
SMALLEST = 0.02
"""What a figure must have grown by, in its unit: the compiler's choices move small ones more. A
table may have a `SMALLEST` of its own."""

Row = dict[str, Any]
"""What was counted ("of", the arguments of a table's `measure`), its figures, and the versions."""


def make_row(of: Mapping[str, Any], figures: Mapping[str, float]) -> Row:
    """A row of the versions at hand."""
    versions = {name: version(name) for name in ("jax", "libtpu")}
    return {"of": dict(of), "figures": dict(figures), "versions": versions}


def load(table: str) -> list[Row]:
    """The rows that are kept."""
    path = FOLDER / f"{table}.json"
    return json.loads(path.read_text()) if path.exists() else []


def save(table: str, rows: list[Row]) -> None:
    """Keep rows, in place of those of the same arguments."""
    new = [row["of"] for row in rows]
    rows = [row for row in load(table) if row["of"] not in new] + rows
    rows.sort(key=lambda row: json.dumps(row["of"], sort_keys=True))
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    (FOLDER / f"{table}.json").write_text(f"[\n{lines}\n]\n")


def print_header(*names: str) -> None:
    """The head of a table in Markdown."""
    print_row(*names)
    print("|---" * len(names) + "|")


def print_row(*cells: Any) -> None:
    """A row of it, at once."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def grown(
    before: Mapping[str, float], after: Mapping[str, float], smallest: float = SMALLEST
) -> dict[str, tuple]:
    """The figures that fell behind, as (before, after)."""
    pairs = {name: (value, after[name]) for name, value in before.items()}
    return {
        name: (old, new)
        for name, (old, new) in pairs.items()
        if not new <= max(GROWTH * old, old + smallest)
    }


def fallen_behind(table: str, row: Row) -> tuple[dict[str, float], dict[str, tuple]]:
    """A row's figures counted again, and those among them that fell behind."""
    module = importlib.import_module(f"benchmarks.{table}")
    after = module.measure(**row["of"])
    return after, grown(row["figures"], after, getattr(module, "SMALLEST", SMALLEST))


def main() -> None:
    """Print what has changed; the exit code tells whether anything fell behind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--where", nargs="+", default=[], help="the rows, as target=v6e; else all")
    options = parser.parse_args()
    where = dict(condition.split("=", 1) for condition in options.where)
    rows = [
        (table, row)
        for table in options.tables
        for row in load(table)
        if all(str(row["of"].get(key)) == value for key, value in where.items())
    ]
    if not rows:
        parser.error(f"no row of {options.tables} is kept where {options.where}")
    fell = False
    for table, row in rows:
        after, worse = fallen_behind(table, row)
        fell |= bool(worse)
        name = " ".join(map(str, row["of"].values()))
        for figure, before in row["figures"].items():
            mark = "  FELL BEHIND" if figure in worse else ""
            print(f"{name}: {figure} {before} -> {after[figure]}{mark}", flush=True)
    sys.exit(fell)


if __name__ == "__main__":
    main()
