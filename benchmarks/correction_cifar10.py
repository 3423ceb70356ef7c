"""How many wrong labels does Procedure 2 leave? Real CIFAR-10, EfficientNet-lite0 features at 128 pixels, 20 users, 200 clean a class.

    FBNLL_DATA=<folder with cifar10/> .venv/bin/python benchmarks/correction_cifar10.py           # writes the CSV and prints the table
    .venv/bin/python benchmarks/correction_cifar10.py --table                                     # prints the table from the CSV

`procedure2_auto` is the library's default: ranks q1 = 20 and l = 30, and a threshold that the server makes of its clean set alone.
`procedure2_best` is the best in hindsight, which nobody can have who does not know the true labels: of every τ, q1 and l below the one
with the least noise left, chosen for each split and noise over all its seeds. A row's noise is the mean of its users.
Users, impurity and noise are those of `fbnll run --dataset cifar10 --tasks M --noise N --seed S --rounds 0`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from fbnll.correction import auto_thresholds, largest_projection, procedure2, server_relevance, unique_match
from fbnll.data import load, progress
from fbnll.experiment import Experiment
from fbnll.features import cached, feature_map
from fbnll.federation import generator
from fbnll.scenario import deal
from fbnll.spectral import class_subspaces, projection_energy, relevance_by_rank
from tables import parser_of, read_rows, spread, write_rows

RESULTS = Path(__file__).parent / "results" / "correction_cifar10.csv"
TASKS, NOISES, SEEDS = (2, 3, 5), ("class_independent", "class_dependent", "uniform"), range(5)
TAUS = (*np.round(np.arange(0.30, 0.96, 0.05), 2).tolist(), 0.99)
Q1S, LS = (3, 5, 10, 20), (5, 10, 20, 30, 50)


class Setting(NamedTuple):
    tasks: int
    noise: str
    seed: int


class Outcome(NamedTuple):
    """The share of wrong labels of every user: before, after the automatic threshold, and after every (τ, q1, l) of the grid."""

    before: np.ndarray
    auto: np.ndarray
    grid: np.ndarray


def measure(setting: Setting, Z: np.ndarray, y: np.ndarray) -> Outcome:
    C = int(y.max()) + 1
    e = Experiment(dataset="cifar10", tasks=setting.tasks, noise=setting.noise, seed=setting.seed).complete()
    dealt = deal(e, y, C)
    Z_s, y_s = Z[dealt.parts.clean], y[dealt.parts.clean]
    Q = class_subspaces(Z_s, y_s, C, max(LS)).astype(np.float32)
    thresholds = auto_thresholds(Z_s, y_s, C, e.q1, e.l, generator(e.seed, "server:tau_sim"))
    before, auto, grid = [], [], []
    for rows, given in zip(dealt.parts.users, dealt.given):
        Z_k, true = Z[rows], y[rows]
        V = class_subspaces(Z_k, given, C, max(Q1S)).astype(np.float32)
        corrected, _ = procedure2(Z_k, given, server_relevance(Z_s, y_s, V[:, :, : e.q1]), Q, e.q1, e.l, thresholds)
        before.append(np.mean(given != true))
        auto.append(np.mean(corrected != true))
        grid.append(_noise_of_grid(Z_k, given, true, Z_s, y_s, V, Q))
    return Outcome(np.array(before), np.array(auto), np.stack(grid))


def _noise_of_grid(
    Z: np.ndarray, given: np.ndarray, true: np.ndarray, Z_s: np.ndarray, y_s: np.ndarray, V: np.ndarray, Q: np.ndarray
) -> np.ndarray:
    """One user's noise after every (τ, q1, l), from the parts of Procedure 2, each computed once for all ranks."""
    C = len(Q)
    server = np.stack([relevance_by_rank(Z_s[y_s == c], V) for c in range(C)], axis=1)  # given class, clean class, rank
    user = np.stack([relevance_by_rank(Z[given == c], Q[:, :, : max(Q1S)]) for c in range(C)])
    second = {l: largest_projection(projection_energy(Z, Q[:, :, :l]), given) for l in LS}
    noise = np.empty((len(TAUS), len(Q1S), len(LS)))
    for i, (tau, q1) in enumerate(product(TAUS, Q1S)):
        match = unique_match((server + user)[:, :, q1 - 1] / 2, np.full(C, tau))[given]
        noise.reshape(-1, len(LS))[i] = [np.mean(np.where(match >= 0, match, second[l]) != true) for l in LS]
    return noise


def rows_of(outcomes: Mapping[Setting, Outcome]) -> Iterator[dict[str, object]]:
    """Two rows a setting, in its order; `best` is chosen over the seeds of one split and noise."""
    noise = {
        key: np.mean([outcome.grid.mean(axis=0) for s, outcome in outcomes.items() if s[:2] == key], axis=0)
        for key in {s[:2] for s in outcomes}
    }
    for setting, outcome in outcomes.items():
        best = np.unravel_index(noise[setting[:2]].argmin(), noise[setting[:2]].shape)
        tau, q1, l = TAUS[best[0]], Q1S[best[1]], LS[best[2]]
        e = Experiment(dataset="cifar10").complete()
        yield _row(setting, "procedure2_auto", outcome.before, outcome.auto, "auto", e.q1, e.l)
        yield _row(setting, "procedure2_best", outcome.before, outcome.grid[(slice(None), *best)], tau, q1, l)


def _row(
    setting: Setting, method: str, before: np.ndarray, after: np.ndarray, tau: object, q1: int | None, l: int | None
) -> dict[str, object]:
    noise = {"noise_before": f"{before.mean():.5f}", "noise_after": f"{after.mean():.5f}", "worst_user": f"{after.max():.5f}"}
    return {**setting._asdict(), "method": method, **noise, "tau": tau, "q1": q1, "l": l}


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Mean and spread over the seeds as Markdown, with the ratio of what the automatic threshold leaves to the best."""
    found: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        of = found[row["tasks"], row["noise"]]
        of["before"].append(float(row["noise_before"]))
        of[row["method"]].append(float(row["noise_after"]))
        if row["method"] == "procedure2_best":
            of["chosen"] = [f"{row['tau']}, {row['q1']}, {row['l']}"]
    lines = ["| tasks | noise | before | `procedure2_auto` | `procedure2_best` | its τ, q1, l | ratio |", "|---|---|---|---|---|---|---|"]
    ratios = []
    for (tasks, noise), of in found.items():
        auto, best = of["procedure2_auto"], of["procedure2_best"]
        ratios.append(mean(auto) / mean(best))
        cells = [tasks, noise.replace("_", "-"), f"{mean(of['before']):.3f}", spread(auto, 3), spread(best, 3), of["chosen"][0]]
        lines.append(f"| {' | '.join(cells)} | {ratios[-1]:.2f} |")
    return "\n".join([*lines, f"| | mean | | | | | {mean(ratios):.2f} |"])


def main() -> None:
    args = parser_of(__doc__).parse_args()
    if not args.table:
        settings = [Setting(*values) for values in product(TASKS, NOISES, SEEDS)]
        features = cached(feature_map("efficientnet_lite0"), load("cifar10", args.data_dir).X_train)  # once, not in every worker
        del features
        with ProcessPoolExecutor(initializer=_prepare, initargs=(args.data_dir,)) as pool:
            outcomes = dict(zip(settings, progress(pool.map(_in_worker, settings), "settings", total=len(settings))))
        write_rows(RESULTS, rows_of(outcomes))
    print(table(read_rows(RESULTS)))


def _prepare(data_dir: str | None) -> None:
    global _cifar10
    threadpool_limits(1)  # a worker per core
    cifar10 = load("cifar10", data_dir, quiet=True)
    _cifar10 = cached(feature_map("efficientnet_lite0"), cifar10.X_train, progress=False), cifar10.y_train


def _in_worker(setting: Setting) -> Outcome:
    return measure(setting, *_cifar10)


_cifar10: tuple[np.ndarray, np.ndarray]

if __name__ == "__main__":
    main()
