"""FB-NLL (Algorithm 1): cluster users by the spectra of their features, correct their labels (Procedure 2), then FedAvg per cluster."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fbnll.clustering import hac
from fbnll.correction import auto_thresholds, procedure2, server_relevance
from fbnll.federation import Desk, Federation, Reference, Round, on_user, stage
from fbnll.methods.fedavg import Init, clustered_fedavg
from fbnll.payload import Payload
from fbnll.spectral import class_subspaces, relevance, top_eigenpairs


@on_user(reply={"V": "f4 d q, orthonormal"}, features="clustering", once=True)
def top_eigenvectors(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    return {"V": top_eigenpairs(user.features, message["q"], message["eps"])[1]}


@on_user(reply={"r": "f8 K, from 0 to 1"}, features="clustering", once=True)
def relevances(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    return {"r": relevance(user.features, message["V"], message["eps"])}


@stage("clustering")
def cluster_by_features(
    fed: Federation, M: int, q: int, eps: float = 0.0, linkage: str = "average"
) -> tuple[Int[np.ndarray, "K"], Float[np.ndarray, "K K"]]:
    V = fed.table(top_eigenvectors, {"q": q, "eps": eps}, missing=0)["V"]  # Algorithm 1, step 1
    r = fed.table(relevances, {"V": V, "eps": eps})["r"]  # step 2: r[k, j]
    R = (r + r.T) / 2  # step 3, eq. 6
    return hac(R, M, linkage), R  # −1 for a user that did not answer


@on_user(reply={"V": "f4 C d q1, orthonormal"}, features="correction", keeps="slots", once=True)
def class_signatures(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    """The user's class subspaces in a random order that it keeps to itself: the server cannot tell which class is which."""
    user.state["slots"] = user.private_rng.permutation(user.C)
    return {"V": class_subspaces(user.features, user.labels, user.C, message["q1"])[user.state["slots"]]}


@on_user(reply={}, features="correction", keeps=("labels", "phase"), once=True)
def relabel(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    r = np.empty_like(message["r"])
    r[user.state["slots"]] = message["r"]  # r[c̃, c]: back from slots to given classes
    thresholds = message["sizes"], message["tau"]
    labels, phase = procedure2(user.features, user.labels, r, message["Q"], message["q1"], message["l"], thresholds)
    user.state.update(labels=labels, phase=phase)
    return {}


@stage("correction")
def correct_labels(fed: Federation, reference: Reference, q1: int, l: int, tau_sim: float | str) -> None:
    """Procedure 2 in two asks; what is decided and relabelled stays with the users."""
    Z_s, y_s = reference.features, reference.y
    Q = class_subspaces(Z_s, y_s, fed.C, max(q1, l)).astype(np.float32)
    if tau_sim == "auto":
        sizes, tau = auto_thresholds(Z_s, y_s, fed.C, q1, l, fed.rng("tau_sim"), partial(fed.watch, name="threshold"))
    else:
        sizes, tau = np.ones(1), np.full(1, tau_sim)
    signatures = fed.ask_all(class_signatures, {"q1": q1})
    common = {"Q": Q, "q1": q1, "l": l, "sizes": sizes, "tau": tau}
    answers = fed.watch(signatures.items(), "relevances of classes")
    fed.ask(relabel, {k: {"r": server_relevance(Z_s, y_s, reply["V"]), **common} for k, reply in answers})


def fb_nll(
    fed: Federation,
    reference: Reference,
    init: Init,
    *,
    M: int,
    q: int,
    q1: int,
    l: int,
    tau_sim: float | str,
    rounds: int,
    eps: float = 0.0,
    linkage: str = "average",
    since: Round | None = None,
    **training: Any,
) -> Iterator[Round]:
    if since is None:
        m, R = cluster_by_features(fed, M, q, eps, linkage)
        correct_labels(fed, reference, q1, l, tau_sim)  # line 15
        since = Round(0, m, [init(fed.rng("init"))] * M, {"R": R})
        yield since
    yield from clustered_fedavg(fed, since, rounds, **training)  # lines 16-25


def fb_nll_minus(
    fed: Federation,
    reference: Reference | None,
    init: Init,
    *,
    M: int,
    q: int,
    rounds: int,
    eps: float = 0.0,
    linkage: str = "average",
    since: Round | None = None,
    **training: Any,
) -> Iterator[Round]:
    """FB-NLL(-): the clustering alone, without line 15."""
    if since is None:
        m, R = cluster_by_features(fed, M, q, eps, linkage)
        since = Round(0, m, [init(fed.rng("init"))] * M, {"R": R})
        yield since
    yield from clustered_fedavg(fed, since, rounds, **training)
