"""From the similarity matrix R to clusters of users, and how well two groupings agree.

A grouping is an array over users: `m[k]` is the cluster of user k, -1 for a user that is in none.
"""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.cluster import hierarchy
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform

LINKAGES = {"average": hierarchy.average, "single": hierarchy.single, "complete": hierarchy.complete}


def hac(R: Float[ndarray, "K K"], M: int, linkage: str = "average") -> Int[ndarray, " K"]:
    """The clusters of hierarchical agglomerative clustering on 1 - R: exactly M, none empty, numbered by their first user.

    A user whose r(k, k) is not above 0 sent nothing to compare and is in none: -1.

    >>> hac(np.array([[1.0, 0.3, 0.9], [0.3, 1.0, 0.2], [0.9, 0.2, 1.0]]), M=2)
    array([0, 1, 0])
    """
    tree, present = merge_tree(R, linkage)
    if not 1 <= M <= len(present):
        raise ValueError(f"M must be from 1 to the number of users that can be compared, but M is {M} and there are {len(present)}")
    m = np.full(len(R), -1)
    m[present] = _cut(tree, M)
    return m


def merge_tree(R: Float[ndarray, "K K"], linkage: str = "average") -> tuple[Float[ndarray, "merges 4"], Int[ndarray, " present"]]:
    """The dendrogram as SciPy's linkage matrix, heights in 1 - R, over the users that can be compared, and who these are."""
    if linkage not in LINKAGES:
        because = ", which needs distances in a Euclidean space" if linkage == "ward" else ""
        raise ValueError(f"linkage must be average, single or complete, but it is {linkage!r}{because}")
    present = np.flatnonzero(R.diagonal() > 0)
    R = R[np.ix_(present, present)]
    if not (np.isfinite(R).all() and np.allclose(R, R.T)):
        raise ValueError("R must be symmetric and finite between users that can be compared, but it is not")
    if len(present) < 2:
        return np.empty((0, 4)), present
    return LINKAGES[linkage](squareform(1 - R, checks=False)), present


def suggest_M(R: Float[ndarray, "K K"], linkage: str = "average", most: int = 20) -> int:
    """The number of clusters, at most `most`, whose mean silhouette is largest; 1 if none is above 0.5.

    Up to there the structure is weak and may be artificial (Kaufman and Rousseeuw 1990). A user alone in a cluster counts as 0: tasks
    of one user each are not found.
    """
    tree, present = merge_tree(R, linkage)
    distance = 1 - R[np.ix_(present, present)]
    np.fill_diagonal(distance, 0)
    widths = {M: _mean_silhouette(distance, _cut(tree, M)) for M in range(2, min(most, len(present) - 1) + 1)}
    M = max(widths, key=widths.__getitem__, default=1)
    return M if M > 1 and widths[M] > 0.5 else 1


def membership(m: Int[ndarray, " K"], M: int) -> Int[ndarray, "K {M}"]:
    """The matrix CI of the paper: CI[k, m] is 1 where user k is in cluster m.

    >>> membership(np.array([1, 0, -1]), M=2)
    array([[0, 1],
           [1, 0],
           [0, 0]])
    """
    CI: ndarray = (m[:, None] == np.arange(M)).astype(int)
    return CI


def adjusted_rand_index(a: Int[ndarray, " K"], b: Int[ndarray, " K"]) -> float:
    """The agreement of two groupings of users: 1 for the same up to names, 0 on average for groupings at random (Hubert and Arabie 1985).

    Users that are in none of a or of b are left out; NaN when nobody is left.

    >>> adjusted_rand_index(np.array([0, 0, 1, 1, -1]), np.array([5, 5, 3, 3, 3]))
    1.0
    """
    shared = _shared_users(a, b)
    if not shared.size:
        return float("nan")
    together, in_a, in_b, pairs = (int((n * (n - 1) // 2).sum()) for n in (shared, shared.sum(1), shared.sum(0), shared.sum()))
    spread = pairs * (in_a + in_b) - 2 * in_a * in_b
    return 2 * (pairs * together - in_a * in_b) / spread if spread else 1.0  # no spread: both all in one, or all alone


def matched_share(a: Int[ndarray, " K"], b: Int[ndarray, " K"]) -> float:
    """The share of users in matching groups, under the best one-to-one matching of the groups of a to those of b (Hungarian method).

    >>> matched_share(np.array([0, 0, 1, 1]), np.array([1, 1, 0, 1]))
    0.75
    """
    shared = _shared_users(a, b)
    return float(shared[linear_sum_assignment(shared, maximize=True)].sum() / shared.sum()) if shared.size else float("nan")


def _shared_users(a: Int[ndarray, " K"], b: Int[ndarray, " K"]) -> Int[ndarray, "groups_a groups_b"]:
    """How many users each group of a shares with each group of b."""
    in_both = (a >= 0) & (b >= 0)
    a, b = a[in_both], b[in_both]
    shared: ndarray = (np.unique(a)[:, None] == a).astype(int) @ (b[:, None] == np.unique(b))
    return shared


def _cut(tree: Float[ndarray, "merges 4"], M: int) -> Int[ndarray, " n"]:
    """Exactly M groups, numbered by their first member; SciPy's fcluster gives fewer where merges tie."""
    groups = hierarchy.cut_tree(tree, [M])[:, 0] if len(tree) else np.zeros(1, int)
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    number: ndarray = first.argsort().argsort()[group]
    return number


def _mean_silhouette(distance: Float[ndarray, "n n"], m: Int[ndarray, " n"]) -> float:
    """The mean of (b - a) / max(a, b), a being the mean distance to the own cluster and b to the nearest other (Rousseeuw 1987)."""
    CI = membership(m, int(m.max()) + 1)
    size, own = CI.sum(0), CI > 0
    total = distance @ CI
    a = total[own] / np.maximum(size[m] - 1, 1)
    b = np.where(own, np.inf, total / size).min(1)
    width = np.divide(b - a, np.maximum(a, b), out=np.zeros_like(a), where=(size[m] > 1) & (np.maximum(a, b) > 0))
    return float(width.mean())
