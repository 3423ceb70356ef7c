"""What exists before a method is chosen: users with their inputs, given labels and features, the server's clean set, and the truth."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fbnll import data
from fbnll.evaluation import Truth
from fbnll.experiment import Experiment
from fbnll.features import FeatureMap, cached, feature_map
from fbnll.federation import Reference, User, generator
from fbnll.methods import load_method, settings_of
from fbnll.noise import NOISES, corrupt
from fbnll.partition import Partition, Tasks, partition, tasks_of
from fbnll.payload import Payload

Phi = str | FeatureMap | Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Scenario:
    """All that exists before a method is chosen: the users' inputs, labels and features, the clean set, and the truth if it is known."""

    X: Sequence[np.ndarray]
    given: Sequence[np.ndarray]
    true: Sequence[np.ndarray] | None
    features: Mapping[str, Sequence[np.ndarray]]  # stage -> Φ(X) of every user
    fingerprints: Mapping[str, str]
    reference: Reference | None
    truth: Truth | None
    classes: Sequence[str]
    M: int
    noise_example: Payload | None = None

    @property
    def phi(self) -> dict[str, tuple[int, str]]:
        return {stage: (parts[0].shape[1], self.fingerprints[stage]) for stage, parts in self.features.items()}

    def fingerprint(self) -> str:
        """A hash of all that a run is made from: inputs, given labels, the clean set, and which features."""
        digest = hashlib.sha256(str(sorted(self.fingerprints.items())).encode())
        for part in (*self.X, *self.given, *((self.reference.X, self.reference.y) if self.reference else ())):
            digest.update(f"{part.dtype} {part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def check(self, e: Experiment, methods: Sequence[str]) -> None:
        """Refuses what the methods could not work with, before anything is written."""
        for name in methods:
            settings = settings_of(load_method(name))
            if "tau_sim" in settings or name == "reference_only":
                _check_clean_set(name, self.reference, len(self.classes))
            if name in ("oracle", "clean") and self.truth is None:
                raise ValueError(f"{name} must know the true tasks, but they are unknown for users given as samples")
        for stage, ranks in {"clustering": ("q",), "correction": ("q1", "l")}.items():
            width = self.phi[stage][0] if stage in self.phi else None
            for name in ranks:
                if width is not None and getattr(e, name) > width:
                    came = f"{name} is {getattr(e, name)} and features have {width} columns"
                    raise ValueError(f"{name} must be at most the feature dimension, but {came}")

    def users(self, seed: int) -> list[User]:
        """Fresh users, with nothing in their states."""
        K, C = len(self.X), len(self.classes)
        users = []
        for k in range(K):
            features = {stage: (parts[k], self.fingerprints[stage]) for stage, parts in self.features.items()}
            truth = {"labels": self.true[k], "task": int(self.truth.tau[k])} if self.true is not None and self.truth else {}
            users.append(User(k, self.X[k], self.given[k], features, C, K, seed, truth))
        return users


def _check_clean_set(method: str, reference: Reference | None, C: int) -> None:
    if reference is None:
        raise ValueError(f"{method} must have a clean set, but reference is not given")
    missing = sorted(set(range(C)) - set(reference.y.tolist()))
    if missing:
        raise ValueError(f"the clean set must have samples of every class, but it has none of {missing}")


def stages_of(experiment: Experiment, methods: Sequence[str], phi: Mapping[str, Phi] | None = None) -> dict[str, Phi]:
    """The stages whose Φ the methods need, and their Φ: from `phi`, or named by the experiment."""
    needed = {"clustering": "q", "correction": "tau_sim"}
    wanted = {stage for stage, setting in needed.items() if any(setting in settings_of(load_method(name)) for name in methods)}
    wanted |= {experiment.inputs} - {"data"}
    return {stage: (phi or {}).get(stage, str(getattr(experiment, f"phi_{stage}"))) for stage in sorted(wanted)}


@dataclass(frozen=True, eq=False)
class Dealt:
    """Who has which samples of a dataset, and the labels that each user was given."""

    tasks: Tasks
    parts: Partition
    given: Sequence[np.ndarray]
    noise_example: Payload


def deal(e: Experiment, y: np.ndarray, C: int) -> Dealt:
    """The samples dealt to users and server, and the users' labels spoilt: a function of labels, settings and seed alone."""
    tasks = tasks_of(e.dataset, e.tasks, C)
    rng = generator(e.seed, "experiment:partition")
    parts = partition(y, tasks, e.users, impurity=e.impurity, clean_per_class=asdict(e)["clean_per_class"], rng=rng)

    def given(k: int, noise: str) -> np.ndarray:
        task = tasks[int(parts.tau[k])]
        others = [c for T in tasks if T is not task for c in T]
        rng = generator(e.seed, "experiment:noise", k)
        true = y[parts.users[k]]
        return corrupt(true, noise, task=task, others=others, C=C, rng=rng, alpha=e.alpha, rho=e.rho, beta=e.beta, coin=e.coin)

    noises = e.noise.split(",")
    labels = [given(k, noises[k % len(noises)]) for k in range(e.users)]
    return Dealt(tasks, parts, labels, _noise_example([y[rows] for rows in parts.users], given, C))


def simulated(e: Experiment, stages: Mapping[str, Phi], seconds: defaultdict[str, float], quiet: bool = True) -> Scenario:
    """Users of a public dataset: partitioned into tasks, with impurity and label noise."""
    begun = time.perf_counter()
    dataset = data.load(e.dataset, e.data_dir, quiet)
    dealt = deal(e, dataset.y_train, len(dataset.classes))
    parts = dealt.parts
    for task, classes in enumerate(dealt.tasks):
        if not np.isin(dataset.y_test, classes).any():
            raise ValueError(f"every task must have test samples, but task {task} with the classes {list(classes)} has none")
    seconds["data"] += time.perf_counter() - begun
    maps = {stage: feature_map(phi, device=e.device) for stage, phi in stages.items()}
    begun = time.perf_counter()
    Z = {stage: cached(phi, dataset.X_train, progress=not quiet) for stage, phi in maps.items()}
    X_train = dataset.X_train if e.inputs == "data" else Z[e.inputs]
    X_test = dataset.X_test if e.inputs == "data" else cached(maps[e.inputs], dataset.X_test, progress=not quiet)
    seconds["features"] += time.perf_counter() - begun
    correction = Z.get("correction", np.empty((len(dataset.y_train), 0), np.float32))
    return Scenario(
        X=[X_train[rows] for rows in parts.users],
        given=dealt.given,
        true=[dataset.y_train[rows] for rows in parts.users],
        features={stage: [values[rows] for rows in parts.users] for stage, values in Z.items()},
        fingerprints={stage: phi.fingerprint for stage, phi in maps.items()},
        reference=Reference(X_train[parts.clean], dataset.y_train[parts.clean], correction[parts.clean]),
        truth=Truth(dealt.tasks, parts.tau, X_test, dataset.y_test),
        classes=dataset.classes,
        M=len(dealt.tasks),
        noise_example=dealt.noise_example,
    )


def _noise_example(true: Sequence[np.ndarray], given: Callable[[int, str], np.ndarray], C: int) -> Payload:
    """What each noise model would make of the labels of one user: counts of true and given classes.

    It is the first user that uniform noise does not spare.
    """
    k = next((k for k, labels in enumerate(true) if (given(k, "uniform") != labels).any()), 0)
    tables = {}
    for noise in ("none", *NOISES[:-1]):
        try:
            table = np.zeros((C, C), int)
            np.add.at(table, (true[k], given(k, noise)), 1)
            tables["clean" if noise == "none" else noise] = table.tolist()
        except ValueError:
            continue  # a model that this user cannot have, such as a target in other tasks where there is one task
    return {"user": k, "models": tables}


Samples = tuple[np.ndarray, np.ndarray]


def from_samples(
    e: Experiment, users: Sequence[Samples], reference: Samples | None, stages: Mapping[str, Phi], quiet: bool = True
) -> Scenario:
    """Users that somebody has: inputs and given labels of each, and the clean set if the method needs one. The truth is unknown."""
    named = [(f"user {k}", X, y) for k, (X, y) in enumerate(users)] + ([("the clean set", *reference)] if reference else [])
    checked = [_checked_samples(*samples) for samples in named]
    C = max([int(y.max()) for _, y in checked if len(y)], default=-1) + 1
    if C < 1:
        raise ValueError("some user must have samples, but none has")
    if C > data.MOST_CLASSES:
        raise ValueError(f"labels must be from 0 to {data.MOST_CLASSES - 1}, but one is {C - 1}")
    shapes = {X.shape[1:] for X, _ in checked if len(X)}
    if len(shapes) > 1:
        raise ValueError(f"samples of all users must have one shape, but they have {sorted(shapes)}")
    kinds = {X.dtype for X, _ in checked if len(X)}
    if len(kinds) > 1:
        raise ValueError(f"samples of all users must be of one type, but they are {' and '.join(sorted(map(str, kinds)))}")
    (shape,), (kind,) = shapes, kinds
    X = [X if len(X) else np.empty((0, *shape), kind) for X, _ in checked]
    maps = {stage: feature_map(phi, device=e.device) for stage, phi in stages.items()}
    ends = np.cumsum([len(part) for part in X])[:-1]
    Z = {stage: np.split(cached(phi, np.concatenate(X), progress=not quiet), ends) for stage, phi in maps.items()}
    inputs = X if e.inputs == "data" else Z[e.inputs]
    correction = Z.get("correction", [np.empty((len(part), 0), np.float32) for part in X])
    K = len(users)
    return Scenario(
        X=inputs[:K],
        given=[y for _, y in checked[:K]],
        true=None,
        features={stage: parts[:K] for stage, parts in Z.items()},
        fingerprints={stage: phi.fingerprint for stage, phi in maps.items()},
        reference=Reference(inputs[K], checked[K][1], correction[K]) if reference else None,
        truth=None,
        classes=[str(c) for c in range(C)],
        M=e.tasks if isinstance(e.tasks, int) else len(e.tasks),
    )


def _checked_samples(who: str, X: np.ndarray, y: np.ndarray) -> Samples:
    X, y = np.asarray(X), np.asarray(y)
    if X.ndim < 2 or X.dtype.kind not in "buif":
        raise ValueError(f"samples of {who} must be real numbers with a row a sample, but they are {X.dtype} {X.shape}")
    if y.ndim != 1 or len(X) != len(y):
        raise ValueError(f"{who} must have one label for each sample, but there are labels {y.shape} for samples {X.shape}")
    if len(y) and not (np.issubdtype(y.dtype, np.integer) and y.min() >= 0):
        raise ValueError(f"labels of {who} must be integers from 0 on, but they are {y.dtype} from {y.min()}")
    if X.dtype != np.uint8:
        X = X.astype(np.float32)
        if not np.isfinite(X).all():
            raise ValueError(f"samples of {who} must be finite, but {int((~np.isfinite(X)).sum())} values are NaN or infinite")
    return X, y.astype(np.int64)
