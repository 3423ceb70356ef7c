"""What does FB-NLL gain on the embedded digits? The demo's setting with every noise, five seeds, all methods.

    .venv/bin/python benchmarks/digits.py            # writes the CSV and prints the table; a few minutes on one core
    .venv/bin/python benchmarks/digits.py --table    # prints the table from the CSV

Seed 0 with class-dependent noise is `fbnll demo`. Accuracy is that of the last round's models on all test samples of the user's own task.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path

import fbnll
from fbnll.data import progress
from fbnll.methods import LABELS
from tables import read_rows, spread, write_rows

RESULTS = Path(__file__).parent / "results" / "digits.csv"
NOISES, SEEDS = ("class_independent", "class_dependent", "uniform", "none"), range(5)
METHODS = ("fb_nll", "fb_nll_minus", "oracle", "fedavg", "local", "reference_only", "clean")


def measure() -> Iterator[dict[str, object]]:
    for noise, seed in progress(list(product(NOISES, SEEDS)), "settings"):
        run = fbnll.run(fbnll.Experiment(noise=noise, seed=seed, method=METHODS[0], eval_every=1000), compare=METHODS[1:])
        for row in run.summary["comparison"]:
            ari = run.summary["clustering"]["ari"]
            accuracy, after, before = (f"{value:.5f}" for value in (row["mean"], row["noise_after"], run.summary["labels"]["noise_before"]))
            yield {
                "noise": noise,
                "seed": seed,
                "method": row["method"],
                "accuracy": accuracy,
                "ari": ari,
                "noise_before": before,
                "noise_after": after,
            }


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Mean and standard deviation over the seeds of accuracy, and of the share of wrong labels that a method trains on."""
    found: defaultdict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        found[row["method"], row["noise"]].append(row)
    methods, noises = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    lines = ["| accuracy, % | " + " | ".join(noise.replace("_", "-") for noise in noises) + " |", "|---|" + "---|" * len(noises)]
    for method in methods:
        cells = [spread([100 * float(row["accuracy"]) for row in found[method, noise]], 1) for noise in noises]
        lines.append(f"| {LABELS[method]} | {' | '.join(cells)} |")
    for what, method in {"wrong labels as given, %": "fb_nll_minus", "wrong labels after FB-NLL, %": "fb_nll"}.items():
        cells = [spread([100 * float(row["noise_after"]) for row in found[method, noise]], 1) for noise in noises]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="print the table from the CSV, measure nothing")
    if not parser.parse_args().table:
        write_rows(RESULTS, measure())
    print(table(read_rows(RESULTS)))


if __name__ == "__main__":
    main()
