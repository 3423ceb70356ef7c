"""What one user's features say about another's: covariances, their top eigenpairs, relevances, and subspaces of classes (Procedure 1).

`Z` is a feature matrix Φ(X), one row per sample. Everything is computed in float64, and nothing here ever sees a label of a user except
to select rows by it. Ranks may differ: arrays are zero-padded to the rank asked for, and a zero column is a direction that is not there.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.linalg import eigh


def covariance(Z: Float[ndarray, "n d"]) -> Float[ndarray, "d d"]:
    """The uncentred covariance Σ = ΦᵀΦ / n, and zeros for no samples.

    >>> covariance(np.array([[2.0, 0.0], [0.0, 4.0]]))
    array([[2., 0.],
           [0., 8.]])
    """
    Z = np.asarray(Z, np.float64)
    return _gram(Z.T, len(Z))  # eq. 1


def top_eigenpairs(Z: Float[ndarray, "n d"], q: int, eps: float | int = 0) -> tuple[Float[ndarray, " {q}"], Float[ndarray, "d {q}"]]:
    """The largest eigenvalues of Σ in descending order, and their unit eigenvectors as columns.

    Kept are at most q, those with λ_i > eps · λ_1 (the adaptive rank), and never more than the numerical rank; the rest is zeros.

    >>> top_eigenpairs(np.array([[2.0, 0.0], [0.0, 4.0]]), q=1)[0]
    array([8.])
    """
    Z = np.asarray(Z, np.float64)
    return _eigenpairs(Z, _smaller_gram(Z), q, eps)


def responses(Z: Float[ndarray, "n d"], W: Float[ndarray, "*users d q"]) -> Float[ndarray, "*users q"]:
    """How strongly the covariance of Z answers along directions of others: e_i = ‖Σ w_i‖, which is λ_i where w_i is an eigenvector."""
    Z = np.asarray(Z, np.float64)
    return _responses(Z, _smaller_gram(Z), W)


def alignment(lam: Float[ndarray, " q"], e: Float[ndarray, "*users q"]) -> Float[ndarray, "*users q"]:
    """The ratio s_i of the smaller to the larger of λ_i and e_i: 1 where they agree, also where both are 0.

    >>> alignment(np.array([4.0, 2.0, 0.0]), np.array([1.0, 2.0, 0.0]))
    array([0.25, 1.  , 1.  ])
    """
    larger = np.maximum(lam, e)
    s: ndarray = np.divide(np.minimum(lam, e), larger, out=np.ones_like(larger), where=larger > 0)  # eq. 4
    return s


def relevance(Z: Float[ndarray, "n d"], W: Float[ndarray, "*users d q"], eps: float | int = 0) -> Float[ndarray, "*users"]:
    """Procedure 1: the relevance r in [0, 1] of others, known by their eigenvectors W, to the owner of Z.

    A pair is compared on the columns that both have; where there is none, r is 0.
    """
    r: ndarray = relevance_by_rank(Z, W, eps)[..., -1]
    return r


def relevance_by_rank(Z: Float[ndarray, "n d"], W: Float[ndarray, "*users d q"], eps: float | int = 0) -> Float[ndarray, "*users q"]:
    """The relevance on the first 1, 2, …, q columns of W, each what `relevance` would give on so many."""
    Z = np.asarray(Z, np.float64)
    gram = _smaller_gram(Z)
    lam, _ = _eigenpairs(Z, gram, W.shape[-1], eps)
    both = (lam > 0) & W.any(axis=-2)
    s = np.where(both, alignment(lam, _responses(Z, gram, W)), 1.0)  # eqs. 3, 4
    log_s = np.log(s, out=np.full_like(s, -np.inf), where=s > 0)  # a product of small ratios would underflow
    rank = both.cumsum(axis=-1)
    return np.where(rank > 0, np.exp(log_s.cumsum(axis=-1) / np.maximum(rank, 1)), 0.0)  # eq. 5


def similarity_matrix(features: Sequence[Float[ndarray, "_ d"]], q: int, eps: float | int = 0) -> Float[ndarray, "K K"]:
    """R for somebody who has the features of all users at hand: the mean of both relevances of a pair, r(k, k) on the diagonal."""
    V = np.stack([top_eigenpairs(Z, q, eps)[1].astype(np.float32) for Z in features])  # float32, as users send them
    r = np.stack([relevance(Z, V, eps) for Z in features])
    R: ndarray = (r + r.T) / 2  # eq. 6
    return R


def class_subspaces(Z: Float[ndarray, "n d"], y: Int[ndarray, " n"], C: int, l: int, eps: float | int = 0) -> Float[ndarray, "{C} d {l}"]:
    """The principal subspaces Q_l^c of the classes 0 … C-1; zeros for a class without samples."""
    if len(y) and not 0 <= y.min() <= y.max() < C:
        raise ValueError(f"labels must be between 0 and {C - 1}, but some are not")  # and not which: a user's error is told to the server
    if not 1 <= l <= Z.shape[1]:
        raise ValueError(f"l must be from 1 to the feature dimension, but l is {l} and features have {Z.shape[1]} columns")
    return np.stack([top_eigenpairs(Z[y == c], l, eps)[1] for c in range(C)])


def projection_energy(Z: Float[ndarray, "n d"], Q: Float[ndarray, "C d l"]) -> Float[ndarray, "n C"]:
    """The length of every sample's projection onto every subspace: ‖QQᵀz‖ = ‖Qᵀz‖, because the columns of Q are orthonormal."""
    Z = np.asarray(Z, np.float64)
    return np.stack([np.linalg.norm(Z @ Q_c, axis=1) for Q_c in Q], axis=1)


def _gram(A: Float[ndarray, "a b"], n: int) -> Float[ndarray, "a a"]:
    with np.errstate(over="ignore", invalid="ignore"):
        gram: ndarray = A @ A.T / max(n, 1)
        if not np.isfinite(gram.trace()):  # values that are not finite, or too large to square, always show in the diagonal
            bad = A.size - np.isfinite(A * A).sum()
            raise ValueError(f"features must be finite, and small enough to be squared, but {bad} of {A.size} values are not")
    return gram


def _smaller_gram(Z: Float[ndarray, "n d"]) -> Float[ndarray, "m m"]:
    """Σ, or ΦΦᵀ / n when there are fewer samples than columns: it has the same nonzero eigenvalues."""
    n, d = Z.shape
    return _gram(Z.T if n >= d else Z, n)


def _eigenpairs(Z: Float[ndarray, "n d"], gram: Float[ndarray, "m m"], q: int, eps: float | int) -> tuple[ndarray, ndarray]:
    n, d = Z.shape
    if not 1 <= q <= d:
        wanted = "at least 1" if q < 1 else "at most the feature dimension"
        raise ValueError(f"q must be {wanted}, but q is {q} and features have {d} columns")
    if not 0 <= eps < 1:
        raise ValueError(f"eps must be at least 0 and below 1, but it is {eps}")
    lam, V = np.zeros(q), np.zeros((d, q))
    if n == 0:
        return lam, V
    m = len(gram)
    ascending, U = eigh(gram, subset_by_index=(max(m - q, 0), m - 1))
    tolerance = max(eps, max(n, d) * np.finfo(np.float64).eps)
    rank = int((ascending > tolerance * ascending[-1]).sum())
    lam[:rank] = ascending[::-1][:rank]
    U = U[:, ::-1][:, :rank]
    V[:, :rank] = U if n >= d else Z.T @ U
    V[:, :rank] /= np.linalg.norm(V[:, :rank], axis=0)  # not √(nλ): the smallest λ are known less well than directions
    return lam, V


def _responses(Z: Float[ndarray, "n d"], gram: Float[ndarray, "m m"], W: Float[ndarray, "*users d q"]) -> Float[ndarray, "*users q"]:
    n, d = Z.shape
    columns = np.moveaxis(np.asarray(W, np.float64), -2, 0).reshape(d, -1)  # one matrix product for all users
    scale = gram.max(initial=0.0) or 1.0  # the norm below squares
    response = gram / scale @ columns if n >= d else Z.T / scale @ (Z @ columns) / max(n, 1)
    e: ndarray = scale * np.linalg.norm(response, axis=0)  # eq. 3
    return e.reshape(*W.shape[:-2], W.shape[-1])
