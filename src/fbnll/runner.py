"""A run: an Experiment and its users through a method; evaluation, history, checkpoints and progress are here, outside of methods."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fbnll import evaluation
from fbnll.clustering import merge_tree
from fbnll.data import progress
from fbnll.experiment import Experiment
from fbnll.features import FeatureMap, feature_map
from fbnll.federation import Federation, Round, Transport, User, checkpoint, federation, find_job, mark_of
from fbnll.federation import resume as resumed
from fbnll.folder import RunFolder
from fbnll.methods import LABELS, load_method, settings_of
from fbnll.payload import Payload
from fbnll.scenario import Phi, Samples, Scenario, from_samples, simulated, stages_of
from fbnll.transports import InProcess, Loopback, Processes

log = logging.getLogger("fbnll")

SGD = ("model", "stem", "epochs", "lr", "momentum", "weight_decay", "batch", "channels_last", "bf16")


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gives back: the summary of result.json, clusters, models, and every user's labels as they are now."""

    summary: Payload
    figures: Payload
    clusters: np.ndarray
    models: Sequence[Mapping[str, np.ndarray]]
    labels: Sequence[np.ndarray]
    folder: Path | None


def run(
    experiment: Experiment | None = None,
    *,
    users: Sequence[Samples] | None = None,
    reference: Samples | None = None,
    phi: Mapping[str, Phi] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    compare: Sequence[str] = (),
    command: str | None = None,
    quiet: bool = True,
) -> Result:
    """Runs an experiment on its dataset, or on `users` [(X, y), …] with a clean set `reference` (X, y) where the method needs one.

    `phi` gives Φ of the stages "clustering" and "correction" as functions of samples, where the names that an Experiment takes do not
    suffice. With `out`, everything is written into that folder, and `resume` continues what is there; `compare` names methods to run
    beside it, and `command` is what to type to run it again.
    """
    e = experiment or Experiment()
    maps = _feature_maps(phi or {}, e.device)
    for stage, own in maps.items():
        e = replace(e, phi_clustering=own.name) if stage == "clustering" else replace(e, phi_correction=own.name)
    e = (e if users is None else replace(e, dataset="users", users=len(users))).complete()
    folder = RunFolder(Path(out), asdict(e), resume) if out is not None else None
    seconds: defaultdict[str, float] = defaultdict(float)
    methods = [e.method, *compare]
    stages = stages_of(e, methods, maps)
    try:
        scenario = simulated(e, stages, seconds, quiet) if users is None else from_samples(e, users, reference, stages, quiet)
        scenario.check(e, methods)
        if folder:
            folder.prepare(scenario.fingerprint(), device=_device(e), command=command, compare=list(compare))
        result = _Run(e, scenario, seconds, folder, quiet).result()
        _finish(folder, result)
        if compare:
            begun = time.perf_counter()
            others = [_Run(replace(e, method=name), scenario, defaultdict(float), None, quiet).result() for name in compare]
            result.summary["comparison"] = [_row(result.summary), *[_row(other.summary) for other in others]]
            result.summary["seconds"]["comparison"] = round(time.perf_counter() - begun, 3)
            _finish(folder, result)
    finally:
        if folder:
            folder.release()
    return result


def _finish(folder: RunFolder | None, result: Result) -> None:
    if folder:
        from fbnll.report import write_report

        folder.finish(result.summary, result.figures, {f"cluster_{m}": w for m, w in enumerate(result.models) if w})
        write_report(folder.path)


def _feature_maps(phi: Mapping[str, Phi], device: str) -> dict[str, FeatureMap]:
    if unknown := sorted(set(phi) - {"clustering", "correction"}):
        raise ValueError(f"phi must be for the stages clustering and correction, but it is for {unknown[0]!r}")
    return {stage: feature_map(own, device=device) for stage, own in phi.items()}


def _row(summary: Payload) -> Payload:
    accuracy, labels = summary["accuracy"], summary["labels"]
    means = {"mean": accuracy["mean"], "std": accuracy["std"], "per_task": [task["mean"] for task in accuracy["per_task"]]}
    noise = labels["noise_after"] if labels else None
    return {"method": summary["method"], "label": summary["label"], **means, "noise_after": noise}


def _device(e: Experiment) -> str:
    if not e.rounds:
        return "cpu"
    from fbnll.models import resolve_device

    return resolve_device(e.device)


def _transport(e: Experiment, users: Sequence[User]) -> Transport:
    name = e.transport or ("processes" if e.workers > 1 else "inprocess")
    if name == "processes":
        return Processes(users, e.workers)
    return Loopback(users) if name == "loopback" else InProcess(users)


class _Run:
    """One method on one scenario."""

    def __init__(self, e: Experiment, scenario: Scenario, seconds: defaultdict[str, float], folder: RunFolder | None, quiet: bool):
        self.e, self.scenario, self.seconds, self.folder, self.quiet = e, scenario, seconds, folder, quiet
        self.begun = time.perf_counter() - seconds["data"] - seconds["features"]
        self.missing: list[Payload] = []
        self.accuracy: np.ndarray | None = None
        self.template: dict[str, np.ndarray] = {}  # weights, for their names and shapes
        self.init: Any = lambda rng: {}
        if e.rounds:  # torch is needed from here on
            from fbnll.models import initial_weights
            from fbnll.training import predict

            network = {name: asdict(e)[name] for name in ("model", "stem")} | {"C": len(scenario.classes)}
            self.init = lambda rng: initial_weights(shape=scenario.X[0].shape[1:], rng=rng, **network)
            self.template = self.init(np.random.default_rng(0))
            self.predict = partial(predict, device=_device(e), **network)

    def result(self) -> Result:
        e, users = self.e, self.scenario.users(self.e.seed)
        transport = _transport(e, users)
        try:
            facts = {"K": len(users), "C": len(self.scenario.classes)}
            fed = federation(transport, **facts, phi=self.scenario.phi, seed=e.seed, missing_at_most=e.missing_at_most)
            fed.server.watch = lambda items, total, name: progress(items, name, self.quiet, total=total)
            with_samples = [k for k, user in enumerate(users) if len(user.given)]
            if len(with_samples) < len(users):
                fed = fed.only(with_samples)
                log.warning("users without samples are left out: %s", ", ".join(map(str, sorted({*range(fed.K)} - {*with_samples}))))
            with threadpool_limits(1, "blas"):  # more threads wait for each other, and where a core is busy for twenty times as long
                last = self._rounds(fed)
            summary, figures = self._summary(fed, last)
            states = [user.states.get(fed.server.named.get(user.number, ""), {}) for user in users]
            labels = [np.array(state.get("labels", user.given)) for user, state in zip(users, states)]
            return Result(summary, figures, last.clusters, last.models, labels, self.folder.path if self.folder else None)
        finally:
            transport.close()

    def _rounds(self, fed: Federation) -> Round:
        """Drives the method from Round to Round, from the checkpoint's on where there is one."""
        e = self.e
        saved = self.folder.checkpoint() if self.folder else None
        last = None
        if saved:
            last = resumed(fed, saved)
            before = saved["notes"]["seconds"]
            self.begun -= before.pop("elapsed")
            self.seconds.update(before)
            self.missing = saved["notes"]["missing"]
        bar = progress(None, e.method, self.quiet, total=e.rounds, initial=last.number if last else 0, unit="round")
        with bar:
            for current, seconds in _timed(self._method(fed, last)):
                last = current
                if last.number:
                    self.seconds["training"] += seconds
                    bar.update()
                self._evaluate(fed, last)
                absences, fed.server.absences = fed.server.absences, []
                self.missing += [{"round": last.number, "job": job, "users": list(users)} for job, users in absences]
                self._record(fed, last, seconds)
        assert last is not None, "a method must yield a Round"
        if self.accuracy is None:
            self._evaluate(fed, last)  # a run that was complete but for its result
        return last

    def _method(self, fed: Federation, since: Round | None) -> Iterator[Round]:
        e, method = self.e, load_method(self.e.method)
        sgd = {name: getattr(e, name) for name in SGD} | {"device": _device(e)}
        settings = {**asdict(e), "M": self.scenario.M, "sgd": sgd}
        chosen = {name: settings[name] for name in settings_of(method) if name in settings}
        return method(fed, self.scenario.reference, self.init, since=since, **chosen)

    def _evaluate(self, fed: Federation, now: Round) -> None:
        e, truth = self.e, self.scenario.truth
        self.accuracy = None
        if truth is not None and now.number and (now.number % e.eval_every == 0 or now.number == e.rounds):
            begun = time.perf_counter()
            self.accuracy = evaluation.user_accuracies(fed, now, truth, self.predict, self.template)
            self.seconds["evaluation"] += time.perf_counter() - begun

    def _record(self, fed: Federation, now: Round, seconds: float) -> None:
        if self.folder is None:
            return
        up, down = _bytes(fed)
        missing = sorted({k for entry in self.missing if entry["round"] == now.number for k in entry["users"]})
        line: Payload = {"round": now.number, "accuracy": None, "missing": missing, "bytes_up": up, "bytes_down": down, "seconds": seconds}
        if self.accuracy is not None and self.scenario.truth is not None:
            accuracy = evaluation.accuracy_summary(self.accuracy, self.scenario.truth)
            line["accuracy"] = {"mean": accuracy["mean"], "per_task": [task["mean"] for task in accuracy["per_task"]]}
        notes = {"seconds": {**self.seconds, "elapsed": time.perf_counter() - self.begun}, "missing": self.missing}
        self.folder.record(line, {**checkpoint(fed, now), "notes": notes})

    def _summary(self, fed: Federation, last: Round) -> tuple[Payload, Payload]:
        e, scenario, truth = self.e, self.scenario, self.scenario.truth
        nothing: Payload = {"mean": None, "std": None, "users_scored": 0, "per_task": [], "per_user": []}
        labels, details = evaluation.label_noise(fed) if truth else ({}, evaluation.label_changes(fed))
        agreement = evaluation.clustering_agreement(last.clusters, truth.tau) if truth and "M" in settings_of(load_method(e.method)) else {}
        stages = {
            **self.seconds,
            **fed.server.seconds,
            "total": time.perf_counter() - self.begun,
        }
        summary = {
            "method": e.method,
            "label": LABELS.get(e.method, e.method),
            "dataset": e.dataset,
            "seed": e.seed,
            "users": len(scenario.X),
            "tasks": [list(T) for T in truth.tasks] if truth else None,
            "classes": list(scenario.classes),
            "rounds": last.number,
            "clustering": {
                "ari": None,
                "matched": None,
                **agreement,
                "clusters": last.clusters.tolist(),
                "tasks": truth.tau.tolist() if truth else None,
                "without_cluster": np.flatnonzero(last.clusters < 0).tolist(),
            },
            "labels": labels or None,
            "accuracy": nothing if self.accuracy is None or truth is None else evaluation.accuracy_summary(self.accuracy, truth),
            "bytes": self._traffic(fed),
            "seconds": {name: round(value, 3) for name, value in stages.items()},
            "missing": self.missing,
        }
        figures = {"noise_example": scenario.noise_example, "flow": None, "phases": None, **details, **_similarity(e, last)}
        return summary, figures

    def _traffic(self, fed: Federation) -> Payload:
        up, down = _bytes(fed)
        traffic = fed.server.traffic
        clustering = [job for job in traffic if mark_of(find_job(job)).features == "clustering"]
        apart = [counted for job, counted in traffic.items() if job.startswith("fbnll.evaluation:")]
        return {
            "up": up,
            "down": down,
            "per_job": {job: {name: counted[name] for name in ("asks", "up", "down")} for job, counted in sorted(traffic.items())},
            "clustering": sum(traffic[job]["up"] + traffic[job]["down"] for job in clustering) or None,
            "one_model_exchange": 2 * fed.K * sum(part.nbytes for part in self.template.values()) or None,
            "evaluation": {name: sum(counted[name] for counted in apart) for name in ("up", "down")},
        }


def _timed(rounds: Iterator[Round]) -> Iterator[tuple[Round, float]]:
    """Every Round with the seconds that the method took for it."""
    while True:
        begun = time.perf_counter()
        current = next(rounds, None)
        if current is None:
            return
        yield current, time.perf_counter() - begun


def _bytes(fed: Federation) -> tuple[int, int]:
    own = [counted for job, counted in fed.server.traffic.items() if not job.startswith("fbnll.evaluation:")]
    return sum(counted["up"] for counted in own), sum(counted["down"] for counted in own)


def _similarity(e: Experiment, last: Round) -> Payload:
    if "R" not in last.memory:
        return {"R": None, "linkage": None, "present": None}
    tree, present = merge_tree(last.memory["R"], e.linkage)
    return {"R": last.memory["R"].tolist(), "linkage": tree.tolist(), "present": present.tolist()}
