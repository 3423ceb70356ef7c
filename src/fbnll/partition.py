"""Who has which samples: tasks, IID users inside a task, impurity from the other tasks, and the clean set of the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from fbnll.noise import whole_part

Tasks = tuple[tuple[int, ...], ...]

_CIFAR10: dict[int, Tasks] = {
    2: ((0, 1, 8, 9), (2, 3, 4, 5, 6, 7)),
    3: ((0, 1, 8), (9, 2, 3), (4, 5, 6, 7)),
    5: ((0, 1), (8, 9), (2, 3), (4, 5), (6, 7)),
}
_SVHN: dict[int, Tasks] = {
    2: ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9)),
    3: ((0, 2, 4), (6, 8, 1), (3, 5, 7, 9)),
    5: ((0, 2), (4, 6), (8, 1), (3, 5), (7, 9)),
}
TASKS = {"cifar10": _CIFAR10, "svhn": _SVHN, "digits": _SVHN, "fashion_mnist": _SVHN}  # tab:tasks; the last two follow SVHN


@dataclass(frozen=True, eq=False)
class Partition:
    """Indices of samples: those of every user, and the clean ones of the server; `tau[k]` is the task of user k."""

    users: tuple[Int[ndarray, " _"], ...]
    tau: Int[ndarray, " K"]
    clean: Int[ndarray, " _"]


def tasks_of(dataset: str, tasks: int | Sequence[Any], C: int) -> Tasks:
    """The classes of every task T_m: the paper's split of a dataset into so many tasks, all classes for 1, or the split given.

    >>> tasks_of("svhn", 2, C=10)
    ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))
    """
    if isinstance(tasks, int | np.integer):
        splits = {1: (tuple(range(C)),), **TASKS.get(dataset, {})}
        if tasks not in splits:
            known = ", ".join(map(str, splits))
            raise ValueError(f"tasks of {dataset} must be {known} or a list of the classes of every task, but it is {tasks}")
        tasks = splits[int(tasks)]
    if not len(tasks) or not all(np.iterable(T) and list(T) for T in tasks):
        raise ValueError(f"every task must be a list of classes, and not empty, but the tasks are {tasks}")
    classes = [c for T in tasks for c in T]
    for c in classes:
        if not isinstance(c, int | np.integer) or not 0 <= c < C:
            raise ValueError(f"classes of a task must be integers from 0 to {C - 1}, but one is {c!r}")
        if classes.count(c) > 1:
            raise ValueError(f"tasks must not share classes, but class {c} is there {classes.count(c)} times")
    return tuple(tuple(map(int, T)) for T in tasks)


def partition(
    y: Int[ndarray, " n"],
    tasks: Sequence[Sequence[int]],
    K: int,
    *,
    impurity: float | int = 0.08,
    clean_per_class: int,
    rng: np.random.Generator,
) -> Partition:
    """Deal the samples to K users in groups of equal size, one group a task, all index sets disjoint.

    First the server's clean set is taken, so many of every class. Then a share of every task, the impurity, is pooled and dealt to all
    users alike, and the rest of the task to its own users. Samples of classes in no task stay with nobody.
    """
    M = len(tasks)
    if K < M:
        raise ValueError(f"users must be at least as many as tasks, but there are {K} users and {M} tasks")
    if not 0 <= impurity <= 1:
        raise ValueError(f"impurity must be between 0 and 1, but it is {impurity}")
    clean = _clean_set(y, tasks, clean_per_class, rng)
    rest = np.setdiff1d(np.arange(len(y)), clean)
    tau = np.sort(np.arange(K) % M)  # 20 users in three tasks: 7, 7, 6
    of_task = [rng.permutation(rest[np.isin(y[rest], T)]) for T in tasks]
    pooled = [whole_part(impurity, len(samples)) for samples in of_task]
    pool = rng.permutation(np.concatenate([samples[:n] for samples, n in zip(of_task, pooled)]))
    own = [part for m in range(M) for part in np.array_split(of_task[m][pooled[m] :], (tau == m).sum())]
    users = tuple(np.sort(np.concatenate(parts)) for parts in zip(own, np.array_split(pool, K)))
    for k, samples in enumerate(users):
        if not len(samples):
            raise ValueError(f"every user must have samples, but user {k} of {K} has none")
    return Partition(users, tau, clean)


def _clean_set(y: Int[ndarray, " n"], tasks: Sequence[Sequence[int]], per_class: int, rng: np.random.Generator) -> Int[ndarray, " n_clean"]:
    """So many samples of every class that there is, in a task or not."""
    samples = {c: np.flatnonzero(y == c) for c in sorted({*y.tolist(), *chain.from_iterable(tasks)})}
    if per_class < 0:
        raise ValueError(f"clean samples per class must be at least 0, but there are {per_class}")
    for c, of_class in samples.items():
        if len(of_class) < per_class:
            raise ValueError(f"every class must have {per_class} samples for the clean set, but class {c} has {len(of_class)}")
    return np.sort(np.concatenate([rng.choice(of_class, per_class, replace=False) for of_class in samples.values()]))
