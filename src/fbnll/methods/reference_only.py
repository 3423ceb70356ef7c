"""The honest baseline of every correction: a model trained on the server's clean set alone, which needs no user."""

from collections.abc import Iterator

import numpy as np

from fbnll.federation import Federation, Reference, Round
from fbnll.methods.fedavg import Init
from fbnll.payload import Payload


def reference_only(
    fed: Federation, reference: Reference, init: Init, *, rounds: int, sgd: Payload, since: Round | None = None
) -> Iterator[Round]:
    """One model for all users; each round trains it once more for the local epochs."""
    if since is None:
        since = Round(0, np.where(np.isin(np.arange(fed.K), fed.users), 0, -1), [init(fed.rng("init"))])
        yield since
    (w,) = since.models
    for t in range(since.number, rounds):
        from fbnll.training import local_sgd

        w = local_sgd(w, reference.X, reference.y, fed.rng("reference", t), C=fed.C, **sgd)[0]
        yield Round(t + 1, since.clusters, [w])
