"""Noisy labels found and corrected by class (Procedure 2): functions of arrays, which the server and a user call in turn.

1. The user's class signatures V (`spectral.class_subspaces`) go to the server, which answers with `server_relevance`.
2. The user, who has the server's subspaces Q as well, decides and relabels by itself: `procedure2`.

A threshold is a number, or a table of class sizes and the threshold for each: two samples of one class look the less alike the smaller
they are, so that a number that suits a class of 1,000 finds nothing in a class of 20. `auto_thresholds` makes such a table of the
server's clean set alone.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from fbnll.spectral import class_subspaces, projection_energy, relevance

Thresholds = float | tuple[Float[ndarray, " sizes"], Float[ndarray, " sizes"]]

REPEATS = 0
SPOILT = [("swap", 0.15), ("swap", 0.3), ("swap", 0.45), ("mix", 0.3), ("mix", 0.6), ("mix", 0.9)]
KAPPAS = np.r_[0.0, np.geomspace(0.3, 10, 120)]
SIZES = np.unique(np.geomspace(1, 100_000, 64).round())


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
        return np.interp(np.log(np.maximum(n, 1)), np.log(sizes), tau)
    return np.full(len(n), float(thresholds))


def auto_thresholds(
    Z_s: Float[ndarray, "n d"], y_s: Int[ndarray, " n"], C: int, q1: int, l: int, rng: np.random.Generator
) -> tuple[Float[ndarray, " sizes"], Float[ndarray, " sizes"]]:
    """A table of class sizes and τ_sim for each, from the clean set alone: what leaves the least noise at users made of it.

    Part of the clean set is held out as a user whose labels are spoilt in known ways, and the rest is its server. There −log r of a class
    and itself falls with the numbers of samples as b·(1/n_s + 1/n)^γ, which says what to expect of the full clean set and of larger users.
    τ_sim is exp(−κ·b·(1/n_s + 1/n)^γ), with the κ for which both phases together leave the smallest share of wrong labels, half of the
    given classes being pure. κ = 0 leaves everything to phase 2.
    """
    n_s = np.bincount(y_s, minlength=C)
    if n_s.min() < 2:
        raise ValueError(f"tau_sim auto must have at least 2 clean samples of every class, but class {n_s.argmin()} has {n_s.min()}")

    def trials(held_out: Sequence[float], spoilt: Sequence[tuple[str, float]]) -> tuple[ndarray, ...]:
        runs = [
            _trial(Z_s, y_s, C, q1, l, share, how, f, rng)
            for share in held_out
            for how, f in spoilt
            for _ in range(REPEATS or max(2, 4000 // len(y_s)))
        ]
        return tuple(np.concatenate(parts) for parts in zip(*runs))

    pure, few = trials((1 / 2, 1 / 4), [("swap", 0.0)]), trials((1 / 10,), [("swap", 0.0)])
    spoilt = trials((1 / 2, 1 / 4), SPOILT)
    own = np.arange(len(pure[0])) % C, np.arange(len(few[0])) % C
    x = np.concatenate([pure[0], few[0]])
    distance = -np.log(np.clip(np.concatenate([t[1][np.arange(len(o)), o] for t, o in zip((pure, few), own)]), 1e-9, 1 - 1e-9))
    gamma = np.clip(np.polyfit(np.log(x), np.log(distance), 1)[0], 1 / 3, 1)
    b = np.exp(np.mean(np.log(distance) - gamma * np.log(x)))
    noise = [sum(_noise_left(*t, kappa * b, gamma) for t in (pure, spoilt)) for kappa in KAPPAS]
    smooth = np.convolve(np.pad(noise[1:], 4, mode="edge"), np.ones(9) / 9, "valid")
    best = 1 + int(np.argmin(smooth))
    kappa = KAPPAS[best] if noise[best] < noise[0] else 0.0
    global LAST
    LAST = dict(b=b, gamma=gamma, kappa=kappa, noise=np.array(noise), pure=pure, few=few, spoilt=spoilt)
    return SIZES, np.exp(-kappa * b * (np.mean(1 / n_s) + 1 / SIZES) ** gamma)


def _noise_left(x, r_avg, wrong, b, gamma):
    match = unique_match(r_avg, np.exp(-b * x**gamma))
    return wrong[np.arange(len(x)), match].mean()


def _trial(Z_s, y_s, C, q1, l, share, how, f, rng):
    """x (C,), r_avg (C, C), wrong (C, C+1): share of wrong labels after relabelling given class c̃ as c, and last column after phase 2."""
    user = np.zeros(len(y_s), bool)
    given = y_s.copy()
    selected = np.zeros(len(y_s), bool)
    for c in range(C):
        i = rng.permutation(np.flatnonzero(y_s == c))
        n = min(max(1, round(share * len(i))), len(i) - 1)
        user[i[:n]] = True
        selected[i[: round(f * n)]] = True
    if how == "swap":
        order = rng.permutation(C)
        nxt = np.empty(C, int)
        nxt[order] = np.roll(order, 1)
        given[selected] = nxt[y_s[selected]]
    else:
        given[selected] = rng.permutation(y_s[selected])
    Z_r, y_r, Z, y, true = Z_s[~user], y_s[~user], Z_s[user], given[user], y_s[user]
    Q = class_subspaces(Z_r, y_r, C, max(q1, l))
    V = class_subspaces(Z, y, C, q1)
    r_avg = (server_relevance(Z_r, y_r, V) + user_relevance(Z, y, Q[:, :, :q1])) / 2
    sizes = np.bincount(y, minlength=C)
    confusion = np.zeros((C, C))
    np.add.at(confusion, (y, true), 1)
    second = largest_projection(projection_energy(Z, Q[:, :, :l]), y) != true
    wrong = np.column_stack([sizes[:, None] - confusion, np.bincount(y, second, minlength=C)]) / sizes[:, None]
    return 1 / np.bincount(y_r, minlength=C) + 1 / sizes, r_avg, wrong
