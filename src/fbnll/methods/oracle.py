"""What knowing the truth would give: the true tasks as clusters (`oracle`), and the true labels as well (`clean`)."""

from collections.abc import Iterator
from typing import Any

from fbnll.evaluation import adopt_true_labels, true_task
from fbnll.federation import Federation, Reference, Round
from fbnll.methods.fedavg import Init, clustered_fedavg


def oracle(
    fed: Federation, reference: Reference | None, init: Init, *, M: int, rounds: int, since: Round | None = None, **training: Any
) -> Iterator[Round]:
    """FedAvg inside the true tasks, on the given labels."""
    if since is None:
        since = Round(0, fed.table(true_task, missing=-1)["task"], [init(fed.rng("init"))] * M)
        yield since
    yield from clustered_fedavg(fed, since, rounds, **training)


def clean(
    fed: Federation, reference: Reference | None, init: Init, *, M: int, rounds: int, since: Round | None = None, **training: Any
) -> Iterator[Round]:
    """FedAvg inside the true tasks, on the true labels."""
    if since is None:
        fed.ask_all(adopt_true_labels)
    yield from oracle(fed, reference, init, M=M, rounds=rounds, since=since, **training)
