"""No federation: every user trains a model of its own on its own data, and keeps it."""

from collections.abc import Iterator

import numpy as np

from fbnll.federation import Desk, Federation, Reference, Round, on_user
from fbnll.methods.fedavg import Init, participants
from fbnll.payload import Payload


@on_user(reply={}, keeps="w")
def train_own(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    from fbnll.training import local_sgd

    w = user.state["w"] if "w" in user.state else message["w"]
    user.state["w"] = local_sgd(w, user.X, user.labels, rng, C=user.C, **message["sgd"])[0]
    return {}


def local(
    fed: Federation,
    reference: Reference | None,
    init: Init,
    *,
    rounds: int,
    sgd: Payload,
    participation: float = 1.0,
    since: Round | None = None,
) -> Iterator[Round]:
    if since is None:
        alone = np.where(np.isin(np.arange(fed.K), fed.users), np.arange(fed.K), -1)
        since = Round(0, alone, memory={"begun": np.zeros(fed.K, bool)})
        yield since
    begun = np.array(since.memory["begun"])
    for t in range(since.number, rounds):
        w = init(fed.rng("init"))  # for those that have no model yet; nothing else goes either way
        users = participants(fed, np.minimum(since.clusters, 0), participation, t)
        replies = fed.ask(train_own, {k: {"sgd": sgd} if begun[k] else {"sgd": sgd, "w": w} for k in users})
        begun[list(replies)] = True
        yield Round(t + 1, since.clusters, memory={"begun": begun.copy()})
