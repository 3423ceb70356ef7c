"""Does one exchange of eigenvectors find the tasks? Real CIFAR-10, HoG features, 20 users: agreement (ARI) of clusters with true tasks.

    FBNLL_DATA=<folder with cifar10/> .venv/bin/python benchmarks/clustering_cifar10.py           # writes the CSV and prints the table
    .venv/bin/python benchmarks/clustering_cifar10.py --table                                     # prints the table from the CSV

Users are those of `fbnll run --dataset cifar10 --tasks M --seed S --impurity I`; no label is looked at, so that label noise of any kind
and amount gives the same numbers. The adaptive rank keeps directions with at least 1 % of the energy of the strongest one
(λ_i > .01 λ_1), at most 50: a cut-off fixed beforehand, not chosen on these data.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import mean

from threadpoolctl import threadpool_limits

from fbnll.clustering import adjusted_rand_index, hac
from fbnll.data import load, progress
from fbnll.experiment import Experiment
from fbnll.features import cached, feature_map
from fbnll.scenario import deal
from fbnll.spectral import similarity_matrix
from tables import parser_of, read_rows, write_rows

RESULTS = Path(__file__).parent / "results" / "clustering_cifar10.csv"
TASKS, SEEDS, IMPURITIES = (2, 3, 5), range(5), (0, 0.08, 0.3)
RANKS = {"2": (2, 0), "5": (5, 0), "10": (10, 0), "20": (20, 0), "adaptive": (50, 0.01)}  # q, eps


def measure(data_dir: str | None) -> Iterator[dict[str, object]]:
    """One row per setting; all ranks see the same partition."""
    cifar10 = load("cifar10", data_dir)
    Z, y = cached(feature_map("hog"), cifar10.X_train), cifar10.y_train
    for M, seed, impurity in progress(list(product(TASKS, SEEDS, IMPURITIES)), "partitions"):
        parts = deal(Experiment(dataset="cifar10", tasks=M, seed=seed, impurity=impurity, noise="none").complete(), y, C=10).parts
        users = [Z[rows] for rows in parts.users]
        for name, (q, eps) in RANKS.items():
            ari = adjusted_rand_index(hac(similarity_matrix(users, q, eps), M), parts.tau)
            yield {"tasks": M, "seed": seed, "q": name, "impurity": impurity, "ari": round(ari, 4)}


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Mean ARI over the seeds as Markdown; a cell holds the impurities in turn."""
    ari = defaultdict(list)
    for row in rows:
        ari[row["q"], row["tasks"], row["impurity"]].append(float(row["ari"]))
    ranks, tasks, impurities = (list(dict.fromkeys(key[i] for key in ari)) for i in range(3))
    shares = " / ".join(f"{float(impurity):.0%}" for impurity in impurities)
    lines = [f"| q | {' | '.join(f'{M} tasks, impurity {shares}' for M in tasks)} |", "|---|" + "---|" * len(tasks)]
    for q in ranks:
        cells = [" / ".join(f"{mean(ari[q, M, impurity]):.2f}" for impurity in impurities) for M in tasks]
        lines.append(f"| {q} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    args = parser_of(__doc__).parse_args()
    if not args.table:
        with threadpool_limits(1):
            write_rows(RESULTS, measure(args.data_dir))
    print(table(read_rows(RESULTS)))


if __name__ == "__main__":
    main()
