"""The one place that sees the truth: accuracy on the users' own tasks, agreement of clusters with tasks, and label noise.

Its asks are counted apart, and nothing they bring back reaches a method, but for `oracle` and `clean`, which say so by their names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64

from fbnll.clustering import adjusted_rand_index, matched_share
from fbnll.federation import Desk, Federation, Round, Weights, like, on_user
from fbnll.payload import Payload

OUTCOMES = ("kept", "missed", "repaired", "broken", "mistaken")  # right → right, wrong → same, wrong → right, right → wrong, wrong → wrong
DECISIONS = ("absent", "phase1_kept", "phase1_relabelled", "phase2", "undecided")  # per given class of a user

Predict = Callable[[Weights, np.ndarray], Float[np.ndarray, "n C"]]


@dataclass(frozen=True)
class Truth:
    """What only a simulation knows: the classes of each task, every user's task, and clean test data."""

    tasks: Sequence[Sequence[int]]
    tau: Int[np.ndarray, "K"]
    X_test: np.ndarray
    y_test: Int[np.ndarray, "n"]

    def test_of(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.isin(self.y_test, self.tasks[task])
        return self.X_test[rows], self.y_test[rows]


@on_user(reply={"task": "i8"}, once=True)
def true_task(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    return {"task": user.truth["task"]}


@on_user(reply={}, keeps="labels", once=True)
def adopt_true_labels(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    user.state["labels"] = user.truth["labels"]
    return {}


@on_user(reply={"w": like("w")})
def own_model(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    return {"w": user.state["w"]}


@on_user(reply={"given_now": "i8 C C", "decisions": "i8 C"})
def changed_labels(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    """Counts of samples by given and present label, and the phase that decided on each given class: what is known without the truth."""
    kept = np.where(user.labels == user.given, 0, 3)
    phase = user.state.get("phase", np.zeros_like(user.given))
    outcomes = _counts((phase, user.given, kept), (3, user.C, len(OUTCOMES)))
    return {"given_now": _counts((user.given, user.labels), (user.C, user.C)), "decisions": _decisions(outcomes)}


@on_user(reply={"true_given": "i8 C C", "true_now": "i8 C C", "given_now": "i8 C C", "outcomes": "i8 3 C 5", "decisions": "i8 C"})
def label_counts(user: Desk, message: Payload, rng: np.random.Generator) -> Payload:
    """Counts of samples by true, given and present label; outcomes by phase (0: none), given class and the OUTCOMES."""
    true, given, now = user.truth["labels"], user.given, user.labels
    phase = user.state.get("phase", np.zeros_like(given))
    wrong, moved, right = given != true, now != given, now == true
    kind = np.select([~wrong & ~moved, wrong & ~moved, wrong & right, ~wrong], [0, 1, 2, 3], 4)
    outcomes = _counts((phase, given, kind), (3, user.C, len(OUTCOMES)))
    return {
        "true_given": _counts((true, given), (user.C, user.C)),
        "true_now": _counts((true, now), (user.C, user.C)),
        "given_now": _counts((given, now), (user.C, user.C)),
        "outcomes": outcomes,
        "decisions": _decisions(outcomes),
    }


def _counts(indices: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> Int64[np.ndarray, "..."]:
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, indices, 1)
    return counts


def _decisions(outcomes: Int64[np.ndarray, "3 C 5"]) -> Int64[np.ndarray, "C"]:
    undecided, phase1, phase2 = outcomes.sum(axis=2) > 0
    stayed = outcomes[1, :, :2].sum(axis=1) > 0  # phase 1 treats the samples of a class alike
    return np.select([phase2, phase1 & stayed, phase1, undecided], [3, 1, 2, 4], 0)


def user_accuracies(fed: Federation, since: Round, truth: Truth, predict: Predict, template: Weights) -> Float[np.ndarray, "K"]:
    """Each user's accuracy: argmax over all C outputs of its model on all clean test samples of its task; NaN without a model.

    Computed once per pair of model and task. Where users hold their own models, these are fetched.
    """
    accuracies = np.full(fed.K, np.nan)

    def score(w: Weights, task: int) -> float:
        X, y = truth.test_of(task)
        return float((predict(w, X).argmax(axis=1) == y).mean())

    if since.models:
        clusters = since.clusters
        pairs = {(int(m), int(task)) for m, task in zip(clusters, truth.tau) if m >= 0}
        for m, task in sorted(pairs):
            accuracies[(clusters == m) & (truth.tau == task)] = score(since.models[m], task)
    elif since.number > 0:
        for k in fed.users:
            for reply in fed.ask(own_model, {k: {"w": template}}).values():
                accuracies[k] = score(reply["w"], int(truth.tau[k]))
    return accuracies


def accuracy_summary(accuracies: Float[np.ndarray, "K"], truth: Truth) -> Payload:
    """Mean and standard deviation over the users that have a model, their number, and the means of every task."""
    scored = ~np.isnan(accuracies)
    per_task = []
    for task, classes in enumerate(truth.tasks):
        own = accuracies[scored & (truth.tau == task)]
        per_task.append({"task": task, "classes": list(classes), "mean": _mean(own), "users": len(own)})
    own = accuracies[scored]
    return {
        "mean": _mean(own),
        "std": float(own.std()) if len(own) else None,
        "users_scored": int(scored.sum()),
        "per_task": per_task,
        "per_user": [float(value) if there else None for value, there in zip(accuracies, scored)],
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def clustering_agreement(clusters: Int[np.ndarray, "K"], tau: Int[np.ndarray, "K"]) -> Payload:
    """Adjusted Rand index and matched share of clusters and true tasks, over the users that have a cluster."""
    there = bool((clusters >= 0).any())
    ari, matched = (adjusted_rand_index(clusters, tau), matched_share(clusters, tau)) if there else (None, None)
    return {"ari": ari, "matched": matched}


def label_noise(fed: Federation) -> tuple[Payload, Payload]:
    """Label noise before and after, summed up and per user; and the counts behind it for figures."""
    replies = fed.ask_all(label_counts)
    per_user = [_user_noise(k, reply) for k, reply in sorted(replies.items())]
    total = _total(replies, ("true_given", "true_now", "given_now", "outcomes"))
    if not per_user or not any(user["n"] for user in per_user):
        return {}, {}
    counted = [user for user in per_user if user["n"]]
    summary = {
        "noise_before": float(np.mean([user["before"] for user in counted])),
        "noise_after": float(np.mean([user["after"] for user in counted])),
        "worst_user_after": max(user["after"] for user in counted),
        "wrong_before": sum(user["missed"] + user["repaired"] + user["mistaken"] for user in counted),
        **{outcome: sum(user[outcome] for user in counted) for outcome in OUTCOMES[1:]},
        "per_user": per_user,
    }
    return summary, {"flow": _flow(total), "phases": _phases(total["outcomes"], [reply["decisions"] for reply in replies.values()])}


def label_changes(fed: Federation) -> Payload:
    """What a correction did to labels whose truth nobody knows: counts for figures."""
    replies = fed.ask_all(changed_labels)
    decisions = [reply["decisions"] for reply in replies.values()]
    if not any(np.isin(chosen, (1, 2, 3)).any() for chosen in decisions):
        return {}
    return {"flow": {"given_corrected": _total(replies, ("given_now",))["given_now"].tolist()}, "phases": _per_class(decisions)}


def _total(replies: dict[int, Payload], names: Sequence[str]) -> Payload:
    return {name: sum((reply[name] for reply in replies.values()), 0) for name in names}


def _user_noise(k: int, reply: Payload) -> Payload:
    outcomes = dict(zip(OUTCOMES, reply["outcomes"].sum(axis=(0, 1)).tolist()))
    n = sum(outcomes.values())
    before = outcomes["missed"] + outcomes["repaired"] + outcomes["mistaken"]
    after = outcomes["missed"] + outcomes["broken"] + outcomes["mistaken"]
    shares = {"before": before / n, "after": after / n} if n else {"before": None, "after": None}
    return {"user": k, "n": n, **shares, **{name: outcomes[name] for name in OUTCOMES[1:]}}


def _flow(total: Payload) -> Payload:
    return {
        "true_given": total["true_given"].tolist(),
        "true_corrected": total["true_now"].tolist(),
        "given_corrected": total["given_now"].tolist(),
    }


def _phases(outcomes: Int64[np.ndarray, "3 C 5"], decisions: Sequence[np.ndarray]) -> Payload | None:
    if not outcomes[1:].any():
        return None  # nothing was decided: the method does not correct

    def per_phase(outcome: str) -> dict[str, Any]:
        return {f"phase{phase}": int(outcomes[phase, :, OUTCOMES.index(outcome)].sum()) for phase in (1, 2)}

    return {**_per_class(decisions), **{outcome: per_phase(outcome) for outcome in OUTCOMES[1:]}}


def _per_class(decisions: Sequence[np.ndarray]) -> Payload:
    """How many users had a given class decided in each way."""
    chosen = np.stack(decisions)
    ways = list(enumerate(DECISIONS[:4]))
    return {"per_class": [{"class": c, **{name: int((column == code).sum()) for code, name in ways}} for c, column in enumerate(chosen.T)]}
