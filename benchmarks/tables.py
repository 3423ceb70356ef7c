"""Rows of a benchmark to a CSV and back."""

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


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
