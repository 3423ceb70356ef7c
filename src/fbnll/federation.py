"""Asking users: jobs and their declared replies, users and their named states, and the server's side of a federation.

The server reaches a user only by an ask. An ask is numbered and names the state to start from, so that asking twice gives the same
bits and a lost reply is a lost ask; what comes back is checked against the declaration of its job before it is used.
"""

import functools
import hashlib
import importlib
import logging
import math
import queue
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Num

from fbnll.payload import Payload, copied, pack, read_only, size, unpack

log = logging.getLogger("fbnll")

Job = Callable[["Desk", Payload, np.random.Generator], Payload]
Weights = dict[str, np.ndarray]
P = ParamSpec("P")
T = TypeVar("T")

TRUSTED = ("fbnll.methods.", "fbnll.evaluation:")  # where a job that somebody asks for may come from
PACKAGE = Path(__file__).parent
TRIES = 3  # deliveries of a one-shot ask before its user counts as missing


# ---------------------------------------------------------------- jobs and what they may reply


class like(NamedTuple):
    """Declares a part of the reply to have the names, dtypes and shapes of a part of the message: `like("w")`."""

    name: str


@dataclass(frozen=True)
class Mark:
    """What a job declares: its reply, the state it may change, the Φ it needs, and whether it is asked only once in a run."""

    name: str
    reply: Mapping[str, str | like]
    keeps: tuple[str, ...]
    features: str | None
    once: bool

    @property
    def evaluates(self) -> bool:
        return self.name.startswith("fbnll.evaluation:")


def on_user(
    *, reply: Mapping[str, str | like], keeps: str | tuple[str, ...] = (), features: str | None = None, once: bool = False
) -> Callable[[Job], Job]:
    """Marks a function `job(user, message, rng) -> reply` as one that the server may ask users for.

    `reply` gives dtype and shape of every part in the letters C, K, d (the width of the Φ named by `features`), integers of the message or
    numerals, as in `{"V": "f4 d q"}`, and behind a comma what its values must be (RULES); nothing else leaves the user. `keeps` names what
    the job may change of the user's state.
    """

    def mark(job: Job) -> Job:
        kept = (keeps,) if isinstance(keeps, str) else keeps
        job.mark = Mark(f"{job.__module__}:{job.__qualname__}", reply, kept, features, once)  # type: ignore[attr-defined]
        return job

    return mark


def mark_of(job: Any) -> Mark:
    mark = getattr(job, "mark", None)
    if not isinstance(mark, Mark):
        raise ValueError(f"a job must be marked with on_user, but {str(getattr(job, '__qualname__', job))[:80]} is not")
    return mark


def find_job(name: str) -> Job:
    """The marked job `module:function`, imported when it is asked for, from the library's own methods and evaluation alone."""
    if not name.startswith(TRUSTED):
        raise ValueError(f"a job must be one of the library's methods, but it is {name[:80]!r}")
    module, _, function = name.partition(":")
    job: Any = getattr(importlib.import_module(module), function, None)
    if mark_of(job).name != name:
        raise ValueError(f"a job must be asked for by its own name, {mark_of(job).name}, but it was asked for as {name[:80]!r}")
    return job  # type: ignore[no-any-return]


class Part(NamedTuple):
    """What one array of a reply must be."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rule: str = "finite"


Expected = Mapping[str, Any]  # names to Parts, nested where the declaration says `like`


def _orthonormal(V: np.ndarray) -> bool:
    """Columns are orthogonal, and of length 1 or, where there is no direction, 0."""
    gram = np.swapaxes(V, -1, -2).astype(np.float64) @ V
    return bool(np.allclose(gram, np.eye(V.shape[-1]) * (gram.diagonal(axis1=-2, axis2=-1)[..., None] > 0.5), atol=1e-2))


RULES: dict[str, Callable[[np.ndarray], bool]] = {
    "finite": lambda part: bool(part.dtype.kind != "f" or np.isfinite(part).all()),
    "not negative": lambda part: bool(np.isfinite(part).all() and (part >= 0).all()),
    "from 0 to 1": lambda part: bool(np.isfinite(part).all() and (part >= 0).all() and (part <= 1).all()),
    "orthonormal": lambda part: bool(np.isfinite(part).all() and _orthonormal(part)),
}


def expected_reply(mark: Mark, message: Payload, facts: Mapping[str, int]) -> Expected:
    """Dtypes and shapes of a reply, from its declaration, the message and the facts C, K and d."""

    def resolve(spec: str | like) -> Any:
        if isinstance(spec, like):
            return _described(message[spec.name])
        kind, _, rule = spec.partition(", ")
        dtype, *dims = kind.split()
        shape = tuple(int(dim) if dim.isdigit() else int(facts.get(dim, message.get(dim, -1))) for dim in dims)
        return Part(np.dtype(dtype), shape, rule or "finite")

    return {name: resolve(spec) for name, spec in mark.reply.items()}


def checked(reply: Any, expected: Expected, where: str = "") -> Payload:
    """Copies of the reply's arrays, or a ValueError naming what differs from the declaration."""
    if not isinstance(reply, Mapping) or set(reply) != set(expected):
        came = sorted(map(str, reply)) if isinstance(reply, Mapping) else type(reply).__name__
        raise ValueError(f"a reply{where} must hold {sorted(expected)}, but it holds {str(came)[:120]}")
    return {name: _checked_part(reply[name], spec, f" {name}") for name, spec in expected.items()}


def _checked_part(part: Any, spec: Any, where: str) -> Any:
    if isinstance(spec, Mapping):
        return checked(part, spec, where)
    if not isinstance(part, np.ndarray) or part.dtype != spec.dtype or part.shape != spec.shape:
        came = f"{part.dtype} {part.shape}" if isinstance(part, np.ndarray) else type(part).__name__
        raise ValueError(f"the reply{where} must be {spec.dtype} {spec.shape}, but it is {came}")
    if not RULES[spec.rule](part):
        finite = RULES["finite"](part)
        raise ValueError(f"the reply{where} must be {spec.rule}, but it {'is not' if finite else 'has NaN or infinities'}")
    return np.array(part, order="C")


def _cast(reply: Any, expected: Any) -> Any:
    """The reply in the declared dtypes: a job may compute in float64 and return plain numbers."""
    if isinstance(expected, Mapping):
        return {name: _cast(part, expected[name]) if name in expected else part for name, part in reply.items()}
    return np.asarray(reply).astype(expected.dtype, order="C", casting="same_kind")


def _described(value: Any) -> Any:
    return {name: _described(part) for name, part in value.items()} if isinstance(value, Mapping) else Part(value.dtype, value.shape)


def _limit(expected: Expected) -> int:
    """The most bytes that a reply may have: its arrays, and room for a header."""

    def parts(spec: Any) -> Iterator[Part]:
        if isinstance(spec, Mapping):
            for part in spec.values():
                yield from parts(part)
        else:
            yield spec

    return 4096 + sum(math.prod(part.shape) * part.dtype.itemsize + 256 for part in parts(expected))


# ---------------------------------------------------------------- the user's side


@dataclass(frozen=True)
class Ask:
    """One numbered request to one user; `state` names the state it starts from, `saved` the last checkpoint's."""

    user: int
    job: str
    message: Payload
    start: int
    number: int
    count: int
    state: str
    saved: str
    phi: str | None

    def to_payload(self) -> Payload:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Failure:
    """Why there is no reply, in one line that holds arguments and shapes but never sample values."""

    text: str


@dataclass
class User:
    """A user's data, its given labels, its Φ for each stage, and the states it keeps by name.

    `truth` (true labels and task, in a simulation) is handed only to the jobs of the evaluation.
    """

    number: int
    X: np.ndarray
    given: Int[np.ndarray, "n"]
    features: Mapping[str, tuple[Float[np.ndarray, "n _"], str]]  # stage -> Φ(X) and its fingerprint
    C: int
    K: int
    seed: int = 0  # of jobs, which the server may know
    truth: Payload = field(default_factory=dict)
    states: dict[str, Payload] = field(default_factory=lambda: {"": {}})
    seen: tuple[int, int] = (-1, -1)

    def begin(self, ask: Ask) -> Payload:
        """The state that the ask starts from; an ask older than one already seen, or from a state that is gone, is refused."""
        if (ask.start, ask.number) < self.seen:
            raise ValueError(f"asks must come in order, but ask {ask.number} came after {self.seen[1]}")
        if ask.state not in self.states:
            raise ValueError(f"the state to start from must be kept here, but {ask.state!r} is not")
        self.seen = (ask.start, ask.number)
        return self.states[ask.state]

    def end(self, ask: Ask, changes: Payload) -> None:
        """Keeps the state the ask started from, the one it made and the last checkpoint's."""
        kept = {name: state for name, state in self.states.items() if name in (ask.state, ask.saved)}
        if changes:
            kept[made_by(ask)] = self.states[ask.state] | changes
        self.states = kept

    def answer(self, ask: Ask) -> Payload:
        reply, changes = perform(self, ask, self.begin(ask))
        self.end(ask, changes)
        return reply


def made_by(ask: Ask) -> str:
    """The name of the state that an ask makes."""
    return f"{ask.start}.{ask.number}"


class Desk:
    """What a job sees of its user: data, the labels as they are now, the Φ it declared, and a state of its own to change."""

    def __init__(self, user: User, mark: Mark, state: Payload):
        self.X, self.given, self.C, self.K = user.X, user.given, user.C, user.K
        self.state = dict(state)
        if mark.features is not None:
            self.features = user.features[mark.features][0]
        if mark.evaluates:
            self.truth = user.truth

    @property
    def private_rng(self) -> np.random.Generator:
        """Randomness that depends on the user's own data: repeatable, and nobody else can have it."""
        digest = hashlib.sha256(np.ascontiguousarray(self.X).data)
        digest.update(np.ascontiguousarray(self.given).data)
        return np.random.default_rng(list(digest.digest()))

    @property
    def labels(self) -> Int[np.ndarray, "n"]:
        """The given labels, or what a correction made of them."""
        return self.state.get("labels", self.given)  # type: ignore[no-any-return]


def perform(user: User, ask: Ask, state: Payload) -> tuple[Payload, Payload]:
    """The reply to an ask and the changes of the state: a function of the user's data, the ask and the state alone."""
    job = find_job(ask.job)
    mark = mark_of(job)
    width = 0
    if mark.features is not None:
        Z, fingerprint = user.features[mark.features]
        width = Z.shape[1]
        if fingerprint != ask.phi:
            raise ValueError(f"Φ must be the server's, {ask.phi}, but this user's is {fingerprint}")
    expected = expected_reply(mark, ask.message, {"C": user.C, "K": user.K, "d": width})
    desk = Desk(user, mark, state)
    reply = job(desk, read_only(ask.message), generator(user.seed, ask.job, user.number, ask.count))
    changes = {name: value for name, value in desk.state.items() if value is not state.get(name)}
    if not set(changes) <= set(mark.keeps):
        raise ValueError(f"{mark.name} must change only {list(mark.keeps)} of a state, but it changed {sorted(changes)}")
    # Every name it keeps is written, so that whether a state was made depends on the job alone, not on the data.
    return checked(_cast(reply, expected), expected), {name: read_only(copied(desk.state[name])) for name in mark.keeps}


def generator(seed: int, name: str, *numbers: int) -> np.random.Generator:
    """Randomness that depends on its arguments alone: not on order, transport or workers."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little"), *numbers])


def described_failure(error: BaseException) -> str:
    """One line about an error. Only the words of errors that this library raised are passed on: others may quote samples."""
    raised_in = traceback.extract_tb(error.__traceback__)
    ours = bool(raised_in) and PACKAGE in Path(raised_in[-1].filename).parents and isinstance(error, ValueError)
    return f"{type(error).__name__}: {error}" if ours else type(error).__name__


def answer_bytes(user: User, data: bytes) -> bytes:
    """The packed reply to a packed ask, or its packed failure: the user's half of every transport that sends bytes."""
    try:
        return pack({"reply": user.answer(Ask(**unpack(data)))})
    except Exception as error:
        return pack({"failure": described_failure(error)})


# ---------------------------------------------------------------- the server's side


@runtime_checkable
class Transport(Protocol):
    """Delivers asks and brings back, in their order, a reply, its bytes, or why there is none."""

    def deliver(self, asks: Sequence[Ask], limits: Sequence[int]) -> Iterator[Payload | bytes | Failure]: ...

    def states(self) -> dict[int, dict[str, Payload]]:
        """The states of users that live in this process, for a checkpoint; empty where they live elsewhere."""
        ...

    def restore(self, states: Mapping[int, dict[str, Payload]]) -> None: ...

    def close(self) -> None: ...


class TooManyMissing(RuntimeError):
    """More users of the federation are missing than `missing_at_most` allows."""


@dataclass(frozen=True)
class Round:
    """What a method has after round `number`: each user's cluster (−1: none), a model per cluster, and what else it needs to go on.

    `models` is empty where users hold their own models in their states.
    """

    number: int
    clusters: Int[np.ndarray, "K"]
    models: Sequence[Weights] = ()
    memory: Payload = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clusters", read_only(np.asarray(self.clusters, np.int64)))
        object.__setattr__(self, "models", tuple(read_only(w) for w in self.models))
        object.__setattr__(self, "memory", read_only(self.memory))


@dataclass(frozen=True)
class Reference:
    """The server's small clean set: inputs of the models, labels, and Φ of them for correction."""

    X: np.ndarray
    y: Int[np.ndarray, "n"]
    features: Float[np.ndarray, "n d"]


class Server:
    """What all parts of one federation share: numbers, names of states, counts of asks and bytes, and who is missing."""

    def __init__(self, transport: Transport, facts: Mapping[str, int], phi: Mapping[str, tuple[int, str]], seed: int, missing_at_most: int):
        self.transport, self.facts, self.phi, self.seed, self.missing_at_most = transport, facts, phi, seed, missing_at_most
        self.start, self.number = 0, 0
        self.counts: Counter[tuple[str, int]] = Counter()
        self.named: dict[int, str] = {}
        self.saved: dict[int, str] = {}
        self.missing: set[int] = set()
        self.absences: list[tuple[str, tuple[int, ...]]] = []  # since they were last taken: job and its missing users
        self.traffic: dict[str, Counter[str]] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)  # per stage
        self.watch: Callable[[Iterator[Any], int, str], Iterable[Any]] = lambda outcomes, total, name: outcomes  # a progress bar

    def wave(self, requests: Sequence[tuple[Mark, Mapping[int, Payload]]]) -> Iterator[tuple[int, Payload]]:
        """Delivers all requests together and yields the valid replies in their order; raises when too many users are missing."""
        asks, specs = [], []
        self.number += 1
        for mark, messages in requests:
            for k, message in messages.items():
                width, fingerprint = self.phi[mark.features] if mark.features else (0, None)
                state, saved = self.named.get(k, ""), self.saved.get(k, "")
                asks.append(Ask(k, mark.name, message, self.start, self.number, self.counts[mark.name, k], state, saved, fingerprint))
                specs.append((mark, expected_reply(mark, message, {**self.facts, "d": width})))
                self.counts[mark.name, k] += 1
        failures: dict[int, str] = {}
        for tries in range(1, TRIES + 1):
            again = [i for i, ask in enumerate(asks) if tries == 1 or (ask.user in failures and specs[i][0].once)]
            if not again:
                break
            outcomes = self.transport.deliver([asks[i] for i in again], [_limit(specs[i][1]) for i in again])
            for i, outcome in zip(again, self.watch(outcomes, len(again), asks[again[0]].job.partition(":")[2]), strict=True):
                ask, (mark, expected) = asks[i], specs[i]
                reply = self._received(ask, outcome, expected)
                if isinstance(reply, Failure):
                    failures[ask.user] = reply.text
                    continue
                failures.pop(ask.user, None)
                if mark.keeps:
                    self.named[ask.user] = made_by(ask)
                yield ask.user, reply
        self._note(requests, failures)

    def _received(self, ask: Ask, outcome: Payload | bytes | Failure, expected: Expected) -> Payload | Failure:
        counted = self.traffic.setdefault(ask.job, Counter())
        counted["asks"] += 1
        counted["down"] += size(ask.to_payload())
        if isinstance(outcome, Failure):
            return outcome
        try:
            if isinstance(outcome, bytes):
                if len(outcome) > (limit := _limit(expected)):
                    raise ValueError(f"a reply must have at most {limit} bytes, but it has {len(outcome)}")
                outcome = unpack(outcome)
                if "failure" in outcome:
                    return Failure(str(outcome["failure"]))
                outcome = outcome.get("reply")  # type: ignore[assignment]
            reply = checked(outcome, expected)
        except Exception as error:  # whatever a hostile user sends, the others go on
            return Failure(described_failure(error))
        counted["up"] += size({"reply": reply})
        return reply

    def _note(self, requests: Sequence[tuple[Mark, Mapping[int, Payload]]], failures: Mapping[int, str]) -> None:
        for mark, messages in requests:
            lost = [k for k in messages if k in failures]
            if not mark.evaluates:  # an evaluation changes nothing, also not who counts as missing
                self.missing.difference_update(messages)
                self.missing.update(lost)
                if lost:
                    self.absences.append((mark.name, tuple(lost)))
            if lost:
                reasons = "; ".join(f"user {k}: {_printable(failures[k])}" for k in lost[:5]) + ("; …" if len(lost) > 5 else "")
                log.warning("%s failed on %d of %d users: %s", mark.name.partition(":")[2], len(lost), len(messages), reasons)
        if len(self.missing) > self.missing_at_most:
            raise TooManyMissing(f"at most {self.missing_at_most} users may be missing, but these are: {sorted(self.missing)}")


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])


class Federation:
    """The users that a method can ask: all of them, or `only` some. Arrays over users always have K entries, row k for user k."""

    def __init__(self, server: Server, users: Sequence[int], gather: "Gather | None" = None):
        self.server, self.users, self._gather = server, tuple(users), gather
        self.K, self.C, self.seed = server.facts["K"], server.facts["C"], server.seed

    def ask(self, job: Job, messages: Mapping[int, Payload]) -> dict[int, Payload]:
        """Asks each user for the job with its own message; users without a valid reply are left out of the answer."""
        return dict(self._replies(job, messages))

    def ask_all(self, job: Job, message: Payload | None = None) -> dict[int, Payload]:
        return self.ask(job, dict.fromkeys(self.users, message or {}))

    def table(self, job: Job, message: Payload | None = None, missing: float | int = np.nan) -> dict[str, np.ndarray]:
        """The replies stacked: row k is user k's, and `missing` for a user without one."""
        mark, message = mark_of(job), message or {}
        width = self.server.phi[mark.features][0] if mark.features else 0
        expected = expected_reply(mark, message, {**self.server.facts, "d": width})
        tables = {}
        for name, part in expected.items():
            fill = missing if part.dtype.kind == "f" else 0 if np.isnan(missing) else int(missing)
            tables[name] = np.full((self.K, *part.shape), fill, part.dtype)
        for k, reply in self._replies(job, dict.fromkeys(self.users, message)):
            for name, values in reply.items():
                tables[name][k] = values
        return tables

    def mean(self, job: Job, messages: Mapping[int, Payload], weights: Num[np.ndarray, "K M"]) -> list[Payload | None]:
        """A mean of the replies for every column of weights, over the users that replied; None where their weights are all 0.

        Replies are added in float64 in the order of users as they come, so that few of them are in memory at a time.
        """
        sums: list[Any] = [None] * weights.shape[1]
        totals = np.zeros(weights.shape[1])
        kinds: Payload = {}
        for k, reply in self._replies(job, {k: messages[k] for k in sorted(messages)}):
            kinds = kinds or _described(reply)
            for column in np.flatnonzero(weights[k]):
                sums[column] = _add(sums[column], reply, float(weights[k, column]))
                totals[column] += weights[k, column]
        return [None if part is None else _divided(part, total, kinds) for part, total in zip(sums, totals)]

    def only(self, users: Collection[int]) -> "Federation":
        """The federation of those of its users."""
        members = set(users)
        return Federation(self.server, [k for k in self.users if k in members], self._gather)

    def watch(self, items: Collection[T], name: str) -> Iterable[T]:
        """The items, under the progress bar of the run if it has one: for what the server itself computes at length."""
        return self.server.watch(iter(items), len(items), name)

    def rng(self, name: str, *numbers: int) -> np.random.Generator:
        """The server's randomness for one purpose."""
        return generator(self.seed, f"server:{name}", *numbers)

    def _replies(self, job: Job, messages: Mapping[int, Payload]) -> Iterator[tuple[int, Payload]]:
        strangers = set(messages) - set(self.users)
        if strangers:
            raise ValueError(f"asked users must be in the federation, but {sorted(strangers)} are not")
        request = (mark_of(job), messages)
        return self.server.wave([request]) if self._gather is None else self._gather.replies(request)


def _add(total: Any, part: Any, weight: float) -> Any:
    if isinstance(part, Mapping):
        return {name: _add(total and total[name], item, weight) for name, item in part.items()}
    term = part * np.float64(weight) if weight != 1 else part.astype(np.float64)
    return term if total is None else np.add(total, term, out=total)


def _divided(part: Any, total: float, kind: Any) -> Any:
    if isinstance(part, Mapping):
        return {name: _divided(item, total, kind[name]) for name, item in part.items()}
    return np.asarray(part / total).astype(kind.dtype)


def federation(
    transport: Transport,
    *,
    K: int,
    C: int,
    phi: Mapping[str, tuple[int, str]] | None = None,
    seed: int = 0,
    missing_at_most: int | None = None,
) -> Federation:
    """A federation of K users over a transport; `phi` gives width and fingerprint of each stage's Φ."""
    at_most = K // 2 if missing_at_most is None else missing_at_most
    return Federation(Server(transport, {"K": K, "C": C}, phi or {}, seed, at_most), range(K))


def checkpoint(fed: Federation, since: Round) -> Payload:
    """All that continuing after a Round needs: the Round, counts of asks, names of states, and the states of users in this process."""
    server = fed.server
    server.saved = dict(server.named)
    held = server.transport.states()
    states = {str(k): kept[server.named.get(k, "")] for k, kept in held.items() if server.named.get(k, "") in kept}
    counts: dict[str, dict[str, int]] = {}
    for (job, k), count in server.counts.items():
        counts.setdefault(job, {})[str(k)] = count
    return {
        "round": {name: getattr(since, name) for name in since.__dataclass_fields__},
        "start": server.start,
        "number": server.number,
        "seconds": dict(server.seconds),
        "counts": counts,
        "named": {str(k): name for k, name in server.named.items()},
        "missing": sorted(server.missing),
        "traffic": {job: dict(counted) for job, counted in server.traffic.items()},
        "states": states,
    }


def resume(fed: Federation, saved: Payload) -> Round:
    """Puts a new federation where the checkpoint was, and gives the Round to go on from."""
    server = fed.server
    server.start, server.number = int(saved["start"]) + 1, int(saved["number"])
    server.seconds.update(saved["seconds"])
    server.counts = Counter({(job, int(k)): count for job, counts in saved["counts"].items() for k, count in counts.items()})
    server.named = {int(k): name for k, name in saved["named"].items()}
    server.saved = dict(server.named)
    server.missing = set(saved["missing"])
    server.traffic = {job: Counter(counted) for job, counted in saved["traffic"].items()}
    server.transport.restore({int(k): {server.named.get(int(k), ""): state} for k, state in saved["states"].items()})
    return Round(**saved["round"])


def stage(name: str) -> Callable[[Callable[Concatenate[Federation, P], T]], Callable[Concatenate[Federation, P], T]]:
    """Marks a server's step whose seconds are told apart in the result of a run."""

    def mark(step: Callable[Concatenate[Federation, P], T]) -> Callable[Concatenate[Federation, P], T]:
        @functools.wraps(step)
        def timed(fed: Federation, /, *args: P.args, **settings: P.kwargs) -> T:
            log.info("%s of %d users", name, len(fed.users))
            begun = time.perf_counter()
            try:
                return step(fed, *args, **settings)
            finally:
                fed.server.seconds[name] += time.perf_counter() - begun

        return timed

    return mark


# ---------------------------------------------------------------- single-model methods inside clusters


class Gather:
    """Lets the asks of several threads travel together: a wave goes out when every thread has asked or is done."""

    def __init__(self, server: Server, threads: int):
        self.server, self.active = server, threads
        self.posted: dict[int, tuple[tuple[Mark, Mapping[int, Payload]], queue.SimpleQueue[Any]]] = {}
        self.lock = threading.Lock()
        self.cluster = threading.local()

    def replies(self, request: tuple[Mark, Mapping[int, Payload]]) -> Iterator[tuple[int, Payload]]:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self.lock:
            self.posted[self.cluster.number] = (request, answers)
            self._send_if_complete()
        while (answer := answers.get()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    def leave(self) -> None:
        with self.lock:
            self.active -= 1
            self._send_if_complete()

    def _send_if_complete(self) -> None:
        if not self.posted or len(self.posted) < self.active:
            return
        posted = [self.posted[number] for number in sorted(self.posted)]  # the order of clusters, whichever thread came first
        self.posted = {}
        owner = {k: answers for (_, messages), answers in posted for k in messages}
        end: BaseException | None = None
        try:
            for k, reply in self.server.wave([request for request, _ in posted]):
                owner[k].put((k, reply))
        except BaseException as error:
            end = error
        for _, answers in posted:
            answers.put(end)


def per_cluster(
    fed: Federation, method: Callable[[Federation, Round | None], Iterator[Round]], m: Int[np.ndarray, "K"], since: Round | None = None
) -> Iterator[Round]:
    """Runs a method of a single model in every cluster at once and yields their Rounds as one; a round waits as long as one cluster."""
    M = int(m.max(initial=-1)) + 1
    members = [np.flatnonzero(m == cluster) for cluster in range(M)]

    def part(cluster: int) -> Round | None:
        if since is None:
            return None
        inside = np.where(m == cluster, 0, -1)
        return Round(since.number, inside, since.models[cluster : cluster + 1], since.memory["clusters"][cluster])

    gather = Gather(fed.server, M)
    runs = [method(Federation(fed.server, members[cluster].tolist(), gather), part(cluster)) for cluster in range(M)]

    def step(cluster: int) -> Round | None:
        gather.cluster.number = cluster
        try:
            return next(runs[cluster], None)
        finally:
            gather.leave()

    with ThreadPoolExecutor(max(M, 1)) as pool:
        while True:
            gather.active = M
            rounds = list(pool.map(step, range(M)))
            if not rounds or any(part is None for part in rounds):
                return
            parts = [part for part in rounds if part is not None]
            yield Round(parts[0].number, m, [w for part in parts for w in part.models], {"clusters": [part.memory for part in parts]})
