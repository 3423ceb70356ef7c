"""FedAvg inside clusters (Algorithm 1, lines 16-25), and FedAvg itself: one cluster of all users."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fbnll.clustering import membership
from fbnll.federation import Desk, Federation, Reference, Round, Weights, like, on_user
from fbnll.payload import Payload

Init = Callable[[np.random.Generator], Weights]


@on_user(reply={"w": like("w")})
def train(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    from fbnll.training import local_sgd

    return {"w": local_sgd(message["w"], user.X, user.labels, rng, C=user.C, **message["sgd"])[0]}


@on_user(reply={"n": "i8, not negative"}, once=True)
def sample_count(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    return {"n": len(user.labels)}


def clustered_fedavg(
    fed: Federation, since: Round, rounds: int, *, sgd: Payload, participation: float = 1.0, weighted: bool = False
) -> Iterator[Round]:
    """Rounds after `since`: every user trains its cluster's model, and the server takes the mean of each cluster.

    The mean is unweighted, as in the paper, or weighted by the users' numbers of samples, which they then tell.
    A cluster from which nobody answers keeps its model.
    """
    m, w, memory = since.clusters, list(since.models), since.memory
    CI = membership(m, len(w))
    for t in range(since.number, rounds):
        if weighted:
            known = np.array(memory["n"]) if "n" in memory else np.zeros(fed.K, np.int64)
            memory = {**memory, "n": known + fed.only(np.flatnonzero(known == 0).tolist()).table(sample_count, missing=0)["n"]}
        users = participants(fed, m, participation, t)
        weights = CI * memory["n"][:, None] if weighted else CI
        means = fed.mean(train, {k: {"w": w[m[k]], "sgd": sgd} for k in users}, weights)
        w = [old if mean is None else mean["w"] for old, mean in zip(w, means)]  # line 22
        yield Round(t + 1, m, w, memory)


def participants(fed: Federation, m: np.ndarray, participation: float, t: int) -> list[int]:
    """The users of round t: of every cluster the same share, and at least one."""
    rng = fed.rng("participation", t)
    clusters = [[k for k in fed.users if m[k] == cluster] for cluster in range(m.max(initial=-1) + 1)]
    return sorted(
        int(k) for users in clusters if users for k in rng.choice(users, max(1, round(participation * len(users))), replace=False)
    )


def fedavg(
    fed: Federation, reference: Reference | None, init: Init, *, rounds: int, since: Round | None = None, **training: Any
) -> Iterator[Round]:
    """One global model of all users, whatever their tasks."""
    if since is None:
        everyone = np.where(np.isin(np.arange(fed.K), fed.users), 0, -1)
        since = Round(0, everyone, [init(fed.rng("init"))])
        yield since
    yield from clustered_fedavg(fed, since, rounds, **training)
