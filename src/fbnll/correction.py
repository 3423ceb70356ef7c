"""Noisy labels found and corrected by class (Procedure 2): functions of arrays, which the server and a user call in turn.

1. The user's class signatures V (`spectral.class_subspaces`) go to the server, which answers with `server_relevance`.
2. The user, who has the server's subspaces Q as well, decides and relabels by itself: `procedure2`.

A threshold is a number, or a table of class sizes and the threshold for each: two samples of one class look the less alike the smaller
they are, so that a number that suits a class of 1,000 finds nothing in a class of 20. `auto_thresholds` makes such a table of the
server's clean set alone.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.ndimage import correlate1d

from fbnll.spectral import class_subspaces, projection_energy, relevance, top_eigenpairs

Thresholds = float | tuple[Float[ndarray, " sizes"], Float[ndarray, " sizes"]]

SIZES = 9  # of simulated given classes, from 1 sample to twice the clean samples of a class; beyond that r hardly changes
SHARES = (0, 0.15, 0, 0.3, 0, 0.5, 0, 0.8)  # of other classes in a simulated given class: half of them are pure
MARGINS = np.linspace(0, 1, 101)  # of −log τ_sim over what a pure class shows
TRIALS = 20_000  # simulated samples of each size at most, in 50 to 400 given classes
SERVERS = 5  # simulated clean sets
NEVER = 1.01  # a threshold that no relevance reaches


def server_relevance(Z_s: Float[ndarray, "n d"], y_s: Int[ndarray, " n"], V: Float[ndarray, "C d q1"]) -> Float[ndarray, "C C"]:
    """How relevant each class signature is to each clean class: r(c, c̃) in row c̃ and column c, whatever the order of the signatures."""
    return np.stack([relevance(Z_s[y_s == c], V) for c in range(len(V))], axis=1)


def user_relevance(Z: Float[ndarray, "n d"], y: Int[ndarray, " n"], Q: Float[ndarray, "C d q1"]) -> Float[ndarray, "C C"]:
    """How relevant each clean class is to each given class: r(c̃, c) in row c̃ and column c; zeros for a class without samples."""
    return np.stack([relevance(Z[y == given], Q) for given in range(len(Q))])


def unique_match(r_avg: Float[ndarray, "given C"], tau: Float[ndarray, " given"]) -> Int[ndarray, " given"]:
    """Phase 1: the only clean class that is as similar as τ_sim asks, or −1 where there is none or more than one.

    >>> unique_match(np.array([[0.9, 0.2], [0.9, 0.8], [0.3, 0.2]]), np.full(3, 0.8))
    array([ 0, -1, -1])
    """
    similar = r_avg >= tau[:, None]
    return np.where(similar.sum(axis=1) == 1, similar.argmax(axis=1), -1)


def largest_projection(energy: Float[ndarray, "n C"], y: Int[ndarray, " n"]) -> Int[ndarray, " n"]:
    """Phase 2: the class whose subspace holds most of a sample; a tie keeps the given label.

    >>> largest_projection(np.array([[1.0, 3.0], [2.0, 2.0]]), np.array([0, 1]))
    array([1, 1])
    """
    largest = energy >= energy.max(axis=1, keepdims=True) * (1 - 1e-6)  # subspaces come as float32
    return np.where(largest.sum(axis=1) == 1, energy.argmax(axis=1), y)


def procedure2(
    Z: Float[ndarray, "n d"],
    y: Int[ndarray, " n"],
    r_server: Float[ndarray, "C C"],
    Q: Float[ndarray, "C d columns"],
    q1: int,
    l: int,
    thresholds: Thresholds,
) -> tuple[Int[ndarray, " n"], Int[ndarray, " n"]]:
    """The user's corrected labels, and the phase that decided on each sample: 1 for its whole class, 2 for itself.

    Phase 1 compares q1 columns of Q, phase 2 projects onto l of them. Both read the labels as they were given.
    """
    if max(q1, l) > Q.shape[2]:
        raise ValueError(f"Q must have a column for each of q1 = {q1} and l = {l}, but it has {Q.shape[2]}")
    r_avg = (r_server + user_relevance(Z, y, Q[:, :, :q1])) / 2  # eq. 6, for classes
    match = unique_match(r_avg, thresholds_at(np.bincount(y, minlength=len(Q)), thresholds))[y]
    return np.where(match >= 0, match, largest_projection(projection_energy(Z, Q[:, :, :l]), y)), np.where(match >= 0, 1, 2)


def thresholds_at(n: Int[ndarray, " given"], thresholds: Thresholds) -> Float[ndarray, " given"]:
    """τ_sim for classes of n samples, between two sizes of the table by the logarithm of n."""
    if isinstance(thresholds, tuple):
        sizes, tau = thresholds
        at: ndarray = np.interp(np.log(np.maximum(n, 1)), np.log(sizes), tau)
        return at
    return np.full(len(n), float(thresholds))


def auto_thresholds(
    Z_s: Float[ndarray, "n d"],
    y_s: Int[ndarray, " n"],
    C: int,
    q1: int,
    l: int,
    rng: np.random.Generator,
    watch: Callable[[range], Iterable[int]] = iter,
) -> tuple[Float[ndarray, " sizes"], Float[ndarray, " sizes"]]:
    """A table of class sizes and τ_sim for each, from the clean set alone: what leaves the fewest wrong labels in a simulation.

    Drawn from a Gaussian a class (`like_classes`), a clean set of the size of the real one meets given classes of n samples, some pure,
    some mixed. −log τ_sim(n) is what pure ones show on average plus a margin, the one with which phase 1 errs least against phase 2,
    whose own errors are cross-validated on the real clean set. Where no margin helps, τ_sim is out of reach and phase 2 decides.
    It takes seconds; `watch` may show a progress bar.
    """
    n_s = np.bincount(y_s, minlength=C)
    if n_s.min() < 2:
        raise ValueError(f"tau_sim auto must have at least 2 clean samples of every class, but class {n_s.argmin()} has {n_s.min()}")
    if C == 1:
        return np.ones(1), np.zeros(1)
    error2 = projection_errors(Z_s, y_s, C, l, rng)
    largest = round(2 * n_s.mean())
    sizes = np.unique(np.geomspace(1, largest, SIZES).round().astype(int))
    true: list[list[ndarray]] = [[] for _ in sizes]
    r_avg: list[list[ndarray]] = [[] for _ in sizes]
    for _ in watch(range(SERVERS)):
        drawn = like_classes(Z_s, y_s, C, n_s + largest, 4 * q1, rng)
        server, users = [Z[:n] for Z, n in zip(drawn, n_s)], [Z[n:] for Z, n in zip(drawn, n_s)]
        Q = _signatures(server, q1)
        for i, n in enumerate(sizes):
            counts = _compositions(int(n), C, int(np.clip(TRIALS // max(n, n_s.mean()), 50, 400)) // SERVERS, rng)
            given = [np.concatenate([rng.choice(Z, m, replace=False) for Z, m in zip(users, row)]) for row in counts]
            V = _signatures(given, q1)
            true[i].append(counts / n)
            from_server = np.stack([relevance(Z, V) for Z in server], axis=1)
            r_avg[i].append((from_server + np.stack([relevance(Z, Q) for Z in given])) / 2)
    gained = [_gains(np.concatenate(r), np.concatenate(t), error2) for r, t in zip(r_avg, true)]
    expected, gains = (np.stack(parts) for parts in zip(*gained))
    gains = correlate1d(correlate1d(gains, np.full(5, 1 / 5), axis=1, mode="nearest"), np.array([1, 2, 1]) / 4, axis=0, mode="nearest")
    tau = np.exp(-expected - MARGINS[gains.argmax(axis=1)])
    return sizes.astype(float), np.where(gains.max(axis=1) > 0, tau, NEVER)


def like_classes(
    Z: Float[ndarray, "n d"], y: Int[ndarray, " n"], C: int, numbers: Int[ndarray, " {C}"], prior: int, rng: np.random.Generator
) -> list[Float[ndarray, "_ d"]]:
    """New samples of every class, so many of each, from a Gaussian with its mean and its covariance.

    The covariance is shrunk towards that of all classes pooled, which counts as much as `prior` samples (Friedman 1989): few samples say
    little about the directions in which their own class varies.
    """
    mean = np.stack([Z[y == c].mean(axis=0, dtype=np.float64) for c in range(C)])
    around = Z - mean[y]

    def draw(c: int, n: int) -> Float[ndarray, "n d"]:
        own = around[y == c]
        share = prior / (prior + len(own))
        of_class = rng.standard_normal((n, len(own))) @ own * np.sqrt((1 - share) / (len(own) - 1))
        of_all = rng.standard_normal((n, len(Z))) @ around * np.sqrt(share / (len(Z) - C))
        z: ndarray = mean[c] + of_class + of_all
        return z

    return [draw(c, int(n)) for c, n in enumerate(numbers)]


def projection_errors(Z: Float[ndarray, "n d"], y: Int[ndarray, " n"], C: int, l: int, rng: np.random.Generator) -> Float[ndarray, " C"]:
    """How often phase 2 would mistake a sample of each class, by cross-validation."""
    shuffled = rng.permutation(len(y))
    place = np.empty(len(y), int)  # of a sample in its class
    for c in range(C):
        of_class = shuffled[y[shuffled] == c]
        place[of_class] = np.arange(len(of_class))
    folds = min(5, np.bincount(y, minlength=C).min())
    wrong = np.empty(len(y), bool)
    for fold in range(folds):
        out = place % folds == fold
        Q = class_subspaces(Z[~out], y[~out], C, l)
        wrong[out] = projection_energy(Z[out], Q).argmax(axis=1) != y[out]
    errors: ndarray = np.bincount(y, wrong, minlength=C) / np.bincount(y, minlength=C)
    return errors


def _compositions(n: int, C: int, trials: int, rng: np.random.Generator) -> Int[ndarray, "trials C"]:
    """How many samples of each true class the simulated given classes have: most of one, the others from one class more or from all."""
    true = np.zeros((trials, C), int)
    for i, (c, share) in enumerate(zip(rng.permutation(np.arange(trials) % C), np.resize(SHARES, trials))):
        foreign = round(share * n)
        others = np.delete(np.arange(C), c)
        np.add.at(true[i], rng.choice(others, foreign) if i // len(SHARES) % 2 else np.full(foreign, rng.choice(others)), 1)
        true[i, c] = n - foreign
    return true


def _signatures(classes: Sequence[Float[ndarray, "_ d"]], q1: int) -> Float[ndarray, "classes d {q1}"]:
    return np.stack([top_eigenpairs(Z, q1)[1] for Z in classes])


def _gains(
    r_avg: Float[ndarray, "trials C"], true: Float[ndarray, "trials C"], error2: Float[ndarray, " C"]
) -> tuple[float, Float[ndarray, " margins"]]:
    """What pure classes show, −log r on average, and for every margin how much less of a class is wrong when phase 1 decides if it can.

    `true` holds shares of true classes.
    """
    own = r_avg[np.arange(len(true)), true.argmax(axis=1)][true.max(axis=1) == 1]
    expected = float(-np.log(np.maximum(own, 1e-9)).mean())

    def gain(margin: float) -> float:
        match = unique_match(r_avg, np.full(len(true), np.exp(-expected - margin)))
        saved = true @ error2 - (1 - true[np.arange(len(true)), match])
        return float(np.where(match >= 0, saved, 0).mean())

    return expected, np.array([gain(float(margin)) for margin in MARGINS])
