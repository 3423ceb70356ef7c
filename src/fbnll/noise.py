"""Label noise: what a user's true labels look like as the user was given them."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray

NOISES = ("class_independent", "class_dependent", "uniform", "none")


def corrupt(
    y: Int[ndarray, " n"],
    noise: str,
    *,
    task: Sequence[int],
    others: Sequence[int],
    C: int,
    rng: np.random.Generator,
    alpha: float | int = 0.25,
    rho: float | int = 0.4,
    beta: float | int = 0.2,
    coin: bool = False,
) -> Int[ndarray, " n"]:
    """The given labels of one user, whose task has the classes `task`, while `others` are those of the other tasks.

    class_independent: ⌊αn⌋ of all samples get one label, drawn from `others`.
    class_dependent: so do ⌊αn⌋ samples of one class of the task, and where it has fewer, of another one.
    uniform: with probability ρ the user is noisy, and ⌊α_k n⌋ samples, α_k drawn between β and 1, get any of the C labels.
    With `coin`, every sample is selected with probability α (α_k) instead. A label drawn may be the true one.
    """
    for name, value in {"alpha": alpha, "rho": rho, "beta": beta}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, but it is {value}")
    if noise not in NOISES:
        raise ValueError(f"noise must be one of {', '.join(NOISES)}, but it is {noise!r}")
    if noise == "none":
        return y.copy()
    if noise == "uniform":
        alpha = rng.uniform(beta, 1) if rng.random() < rho else 0.0
    elif not len(others):
        raise ValueError(f"{noise} noise must find its target in another task, but there is only one task")
    n_noisy = rng.binomial(len(y), alpha) if coin else whole_part(alpha, len(y))
    candidates = _one_class_after_another(y, task, rng) if noise == "class_dependent" else rng.permutation(len(y))
    if n_noisy > len(candidates):
        raise ValueError(
            f"class_dependent noise must find its samples in the user's task, but it needs {n_noisy} and finds {len(candidates)}"
        )
    given = y.copy()
    given[candidates[:n_noisy]] = rng.integers(C, size=n_noisy) if noise == "uniform" else rng.choice(others)
    return given


def whole_part(share: float | int, n: int) -> int:
    """⌊share · n⌋ of a share that is written in decimals.

    >>> whole_part(0.29, 100), int(0.29 * 100)
    (29, 28)
    """
    return math.floor(share * n + 1e-9)


def _one_class_after_another(y: Int[ndarray, " n"], task: Sequence[int], rng: np.random.Generator) -> Int[ndarray, " n_task"]:
    """The samples of the task, class by class; classes and the samples in them are in random order."""
    return np.concatenate([rng.permutation(np.flatnonzero(y == c)) for c in rng.permutation(task)])
