"""The page of a run: true to its files, safe whatever they hold, and fit to be looked at in a browser."""

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fbnll.report import write_report

DIGITS = [str(c) for c in range(10)]
CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def confusion(a: np.ndarray, b: np.ndarray, C: int) -> list[list[int]]:
    counts = np.zeros((C, C), int)
    np.add.at(counts, (a, b), 1)
    return counts.tolist()


def made_up_run(folder: Path, K: int = 20, classes: list[str] = DIGITS, M: int = 2, rounds: int = 12, seed: int = 0) -> Path:
    """A run folder as `fbnll run` leaves it: its labels are drawn, and every number counted from them."""
    rng, C = np.random.default_rng(seed), len(classes)
    splits = [list(range(t, C, M)) for t in range(M)]
    tasks = [k % M for k in range(K)]
    true = [rng.choice(splits[t], 65) for t in tasks]
    given = [np.where(rng.random(65) < 0.25 * (k % 7 > 0), (y + 1 + k) % C, y) for k, y in enumerate(true)]
    corrected = [np.where(rng.random(65) < 0.85, y, np.where(rng.random(65) < 0.3, rng.integers(0, C, 65), g)) for y, g in zip(true, given)]
    per_user = [
        {
            "user": k, "n": 65, "before": float(np.mean(g != y)), "after": float(np.mean(c != y)), "repaired": int(np.sum((g != y) & (c == y))),
            "broken": int(np.sum((g == y) & (c != y))), "missed": int(np.sum((g != y) & (c == g))), "mistaken": int(np.sum((g != y) & (c != y) & (c != g))),
        }
        for k, (y, g, c) in enumerate(zip(true, given, corrected))
    ]  # fmt: skip
    totals = {name: sum(user[name] for user in per_user) for name in ("repaired", "broken", "missed", "mistaken")}
    noisy = rng.normal(0, 0.03, (K, K))
    R = np.clip(np.where(np.equal.outer(tasks, tasks), 0.55, 0.15) + (noisy + noisy.T) / 2, 0, 1)
    np.fill_diagonal(R, 1.0)
    accuracy = np.clip(rng.normal(0.93, 0.01, K), 0, 1).tolist()
    means = [float(np.mean(accuracy[t::M])) for t in range(M)]
    y, g, c = map(np.concatenate, (true, given, corrected))
    result = {
        "method": "fb_nll", "dataset": "digits", "seed": 0, "users": K, "tasks": splits, "classes": classes,
        "clustering": {"ari": 1.0, "matched": 1.0, "clusters": [(t + 1) % M for t in tasks], "tasks": tasks, "without_cluster": []},
        "labels": {
            "noise_before": float(np.mean([u["before"] for u in per_user])), "noise_after": float(np.mean([u["after"] for u in per_user])),
            "wrong_before": int((y != g).sum()), **totals, "per_user": per_user,
        },
        "accuracy": {
            "mean": float(np.mean(accuracy)), "std": float(np.std(accuracy)), "users_scored": K, "per_user": accuracy,
            "per_task": [{"task": t, "classes": splits[t], "mean": means[t], "users": tasks.count(t)} for t in range(M)],
        },
        "bytes": {
            "up": 48_210_334, "down": 51_004_128, "clustering": 83_213, "one_model_exchange": 4_316_800, "evaluation": {"up": 2_312, "down": 2_158_400},
            "per_job": {
                "fbnll.methods.fb_nll:top_eigenvectors": {"asks": K, "up": 51_840, "down": 2_140},
                "fbnll.methods.fb_nll:relevances": {"asks": K, "up": 4_160, "down": 25_073},
                "fbnll.methods.fedavg:train": {"asks": K * rounds, "up": 48_154_334, "down": 50_976_915},
            },
        },
        "seconds": {"data": 0.21, "features": 0.03, "clustering": 0.4, "correction": 1.2, "training": 14.8, "evaluation": 1.1, "total": 17.7},
        "missing": [{"round": 3, "job": "fbnll.methods.fedavg:train", "users": [4, 5, 6, 9]}],
        "comparison": [
            {"method": name, "label": words, "mean": mean, "std": 0.012, "per_task": [max(mean - 0.02 * (t - M / 2) / M, 0.0) for t in range(M)]}
            for name, words, mean in [
                ("clean", "True tasks, clean labels", 0.964), ("fb_nll", "FB-NLL", float(np.mean(accuracy))), ("fb_nll_minus", "FB-NLL(−), labels as given", 0.861),
                ("fedavg", "One global model", 0.693),
            ]
        ],
    }  # fmt: skip
    one = {"clean": (true[1], true[1]), "class_independent": (true[1], np.where(rng.random(65) < 0.25, splits[0][1], true[1]))}
    one |= {
        "class_dependent": (true[1], np.where(true[1] == splits[1][0], splits[0][1], true[1])),
        "uniform": (true[1], np.where(rng.random(65) < 0.4, rng.integers(0, C, 65), true[1])),
    }
    kept = rng.integers(0, K + 1, C)
    again = rng.integers(0, K - kept + 1)
    per_class = [
        {"class": i, "phase1_kept": int(a), "phase1_relabelled": int(b // 2), "phase2": int(b - b // 2), "absent": int(K - a - b)}
        for i, (a, b) in enumerate(zip(kept, again))
    ]
    figures = {
        "R": R.tolist(), "linkage": linkage(squareform(1 - R, checks=False), "average").tolist(), "present": list(range(K)),
        "noise_example": {"user": 1, "models": {name: confusion(*pair, C) for name, pair in one.items()}},
        "flow": {"true_given": confusion(y, g, C), "true_corrected": confusion(y, c, C), "given_corrected": confusion(g, c, C)},
        "phases": {"per_class": per_class, "repaired": {"phase1": totals["repaired"] * 2 // 3, "phase2": totals["repaired"] // 3}, "broken": {"phase1": totals["broken"] // 3, "phase2": totals["broken"] * 2 // 3}},
    }  # fmt: skip
    curve = [0.1 + 0.83 * (1 - np.exp(-t / 3)) for t in range(rounds + 1)]
    history = [
        {
            "round": t,
            "accuracy": {"mean": a, "per_task": [a * (1 + 0.05 * np.sin(m + t)) for m in range(M)]} if t != 3 else None,
            "missing": [],
            "seconds": 1.2,
        }
        for t, a in enumerate(curve)
    ]
    experiment = {
        "dataset": "digits",
        "method": "fb_nll",
        "users": K,
        "noise": "class_dependent",
        "alpha": 0.25,
        "rounds": rounds,
        "q": 8,
        "tau_sim": "auto",
        "tasks": splits,
        "data_dir": None,
    }
    config = {
        "experiment": experiment,
        "seed": 0,
        "device": "cpu",
        "versions": {"fbnll": "0.1.0", "numpy": np.__version__},
        "command": "fbnll run --dataset digits --method fb_nll --noise class_dependent --seed 0 --out runs/digits",
    }
    return written(folder, config, result, figures, history)


def written(folder: Path, config: Any, result: Any, figures: Any, history: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config", config), ("result", result), ("figures", figures)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    return folder
