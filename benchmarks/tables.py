"""Rows of a benchmark to a CSV and back, and the tables in the documents.

    .venv/bin/python benchmarks/tables.py    # writes every table of README.md anew from its CSV

A table stands in a document between the lines `<!-- table: NAME -->` and `<!-- end -->`, where NAME is that of a script in this folder.
"""

import argparse
import csv
import importlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, pstdev


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark on real data takes; `description` is its docstring."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--data-dir", help="folder that holds cifar10 (default: $FBNLL_DATA)")
    parser.add_argument("--table", action="store_true", help="print the table from the CSV, measure nothing")
    return parser


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """All rows or none: an interrupted benchmark leaves the earlier results."""
    rows = list(rows)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {pstdev(values):.{digits}f}"


def with_tables(text: str) -> str:
    """The document with every table made again from its CSV."""

    def made(match: re.Match[str]) -> str:
        benchmark = importlib.import_module(match[1])
        return f"<!-- table: {match[1]} -->\n\n{benchmark.table(read_rows(benchmark.RESULTS))}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", made, text, flags=re.DOTALL)


if __name__ == "__main__":
    readme = Path(__file__).parent.parent / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
