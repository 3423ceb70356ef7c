"""IFCA-PFL (Algorithm 2): every round each user joins the cluster whose model has the least loss on its given labels.

Adapted from IFCA (Ghosh et al. 2020) so that no cluster is ever empty, at the start (Procedure 3) and after every round (Procedure 4).
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from fbnll.federation import Desk, Federation, Reference, Round, Weights, on_user
from fbnll.methods.fedavg import Init, clustered_fedavg
from fbnll.payload import Payload

log = logging.getLogger("fbnll")


@on_user(reply={"F": "f8 M, not negative"})
def losses(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    """F_k(w_m): the mean cross-entropy of every model on all samples of the user."""
    from fbnll.training import predict

    if not len(user.labels):
        raise ValueError("a user must have samples to compare models, but it has none")
    rows = np.arange(len(user.labels))
    return {"F": np.array([-predict(w, user.X, C=user.C, **message["network"])[rows, user.labels].mean() for w in message["w"]])}


def loss_table(fed: Federation, w: Sequence[Weights], sgd: Payload) -> Float[np.ndarray, "K M"]:
    """L[k, m], and NaN for a user that did not answer."""
    network = {name: sgd[name] for name in ("model", "stem", "device")}
    L: np.ndarray = fed.table(losses, {"w": list(w), "M": len(w), "network": network})["F"]
    return L


def initial_clusters(fed: Federation, init: Init, M: int, sgd: Payload, draws: int) -> tuple[Int[np.ndarray, "K"], list[Weights]]:
    """Procedure 3: new random models until every cluster has a user, at most so many times; then equal clusters at random."""
    for draw in range(draws):
        w = [init(fed.rng("init", draw, cluster)) for cluster in range(M)]
        m = nearest(loss_table(fed, w, sgd))
        if none_empty(m, M):
            return m, w
    log.warning("no %d random models in %d draws gave every cluster a user: users are dealt to clusters at random", M, draws)
    there = np.flatnonzero(m >= 0)
    m[fed.rng("deal").permutation(there)] = np.arange(len(there)) % M
    return m, w


def nearest(L: Float[np.ndarray, "K M"]) -> Int[np.ndarray, "K"]:
    """The model with the least loss for every user, the first of equal ones; −1 without losses.

    >>> nearest(np.array([[0.5, 0.1], [0.2, 0.2], [np.nan, np.nan]]))
    array([ 1,  0, -1])
    """
    known = np.isfinite(L).all(axis=1)
    return np.where(known, np.where(known[:, None], L, 0).argmin(axis=1), -1)


def none_empty(m: Int[np.ndarray, "K"], M: int) -> bool:
    return all((m == cluster).any() for cluster in range(M))


def reassociated(L: Float[np.ndarray, "K M"], m: Int[np.ndarray, "K"]) -> Int[np.ndarray, "K"]:
    """Procedure 4: every user to the model with its least loss or, if that leaves a cluster empty, to clusters of the sizes of before.

    Then one cluster after the other takes the users with the least loss for its model of those that are left. A user without losses stays.

    >>> reassociated(np.array([[0.1, 0.9], [0.3, 0.8], [0.2, 0.7]]), np.array([0, 1, 0]))
    array([0, 1, 0])
    """
    least, M = nearest(L), L.shape[1]
    known = least >= 0
    chosen = np.where(known, least, m)
    if none_empty(chosen, M):
        return chosen
    left = np.where(known[:, None], L, np.inf)
    for cluster in range(M):
        size = int((known & (m == cluster)).sum())
        closest = left[:, cluster].argsort(kind="stable")[:size]  # of equal losses the first user
        chosen[closest] = cluster
        left[closest] = np.inf
    return chosen


def ifca_pfl(
    fed: Federation,
    reference: Reference | None,
    init: Init,
    *,
    M: int,
    rounds: int,
    sgd: Payload,
    participation: float = 1.0,
    weighted: bool = False,
    draws: int = 100,
    since: Round | None = None,
) -> Iterator[Round]:
    if since is None:
        m, w = initial_clusters(fed, init, M, sgd, draws)
        since = Round(0, m, w)
        yield since
    for t in range(since.number, rounds):
        (trained,) = clustered_fedavg(fed, since, t + 1, sgd=sgd, participation=participation, weighted=weighted)
        m = reassociated(loss_table(fed, trained.models, sgd), np.array(since.clusters))
        since = Round(t + 1, m, trained.models, trained.memory)
        yield since
