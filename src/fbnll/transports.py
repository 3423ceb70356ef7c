"""Ways to deliver asks: in this process, as bytes, to all cores, and with faults. None of them knows what is asked."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fbnll.federation import Ask, Failure, Transport, User, answer_bytes, described_failure, perform
from fbnll.payload import Payload, pack, read_only, unpack

DEATHS = 3  # a job whose worker died this often is given up: it may be the job that kills it


class InProcess:
    """Users in this process, asked one after the other; messages and replies are passed as they are."""

    def __init__(self, users: Sequence[User]):
        self.users = {user.number: user for user in users}

    def deliver(self, asks: Sequence[Ask], limits: Sequence[int]) -> Iterator[Payload | bytes | Failure]:
        for ask in asks:
            try:
                yield self.users[ask.user].answer(ask)
            except Exception as error:
                yield Failure(described_failure(error))

    def states(self) -> dict[int, dict[str, Payload]]:
        return {k: user.states for k, user in self.users.items()}

    def restore(self, states: Mapping[int, dict[str, Payload]]) -> None:
        for k, kept in states.items():
            self.users[k].states = {"": {}, **{name: read_only(state) for name, state in kept.items()}}

    def close(self) -> None:
        pass


class Loopback(InProcess):
    """Users in this process, but every ask and every reply is packed whole, as on a wire."""

    def deliver(self, asks: Sequence[Ask], limits: Sequence[int]) -> Iterator[Payload | bytes | Failure]:
        for ask in asks:
            yield answer_bytes(self.users[ask.user], pack(ask.to_payload()))


class Processes(InProcess):
    """Users spread over worker processes, user k on worker k mod `workers`; their states stay in this process.

    A worker holds nothing but data, so one that dies is replaced and its users' jobs run again with the same bits.
    """

    def __init__(self, users: Sequence[User], workers: int | None = None):
        super().__init__(users)
        count = max(1, min(workers or os.cpu_count() or 1, len(users)))
        self.workers: list[Worker | None] = [None] * count
        self._lanes = [ThreadPoolExecutor(1) for _ in range(count)]  # a thread per worker, waiting for it
        self._closed = False

    def deliver(self, asks: Sequence[Ask], limits: Sequence[int]) -> Iterator[Payload | bytes | Failure]:
        running: deque[Future[Payload | Failure]] = deque()
        for ask in asks:
            running.append(self._lanes[ask.user % len(self._lanes)].submit(self._answer, ask))
            if len(running) > 2 * len(self._lanes):  # few replies in memory, every worker busy
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def close(self) -> None:
        self._closed = True
        self._end_workers()
        for lane in self._lanes:
            lane.shutdown(cancel_futures=True)
        self._end_workers()  # one that was being started in the meantime

    def _end_workers(self) -> None:
        for worker in self.workers:
            if worker is not None:
                worker.close()

    def _answer(self, ask: Ask) -> Payload | Failure:
        user = self.users[ask.user]
        try:
            state = user.begin(ask)
            for _ in range(DEATHS):
                try:
                    answer = self._worker(ask.user).call(user, ask, state)
                    break
                except (EOFError, OSError):
                    self._retire(ask.user)
            else:
                return Failure(f"its worker died {DEATHS} times")
        except Exception as error:
            return Failure(described_failure(error))
        if "failure" in answer:
            return Failure(answer["failure"])
        user.end(ask, answer["changes"])
        return answer["reply"]  # type: ignore[no-any-return]

    def _worker(self, user: int) -> "Worker":
        lane = user % len(self.workers)
        if self._closed:
            raise ValueError("a transport must be open to deliver asks, but it is closed")
        self.workers[lane] = self.workers[lane] or Worker()
        return self.workers[lane]  # type: ignore[return-value]

    def _retire(self, user: int) -> None:
        lane = user % len(self.workers)
        if (worker := self.workers[lane]) is not None:
            worker.close()
        self.workers[lane] = None


class Worker:
    """A process that performs jobs on the data of the users it was given; it ends when this side of its socket is closed."""

    def __init__(self) -> None:
        from multiprocessing.connection import Connection

        ours, theirs = socket.socketpair()
        with theirs:
            # Its own session: Ctrl-C reaches the parent alone, which closes the socket. One thread: workers share the cores.
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from fbnll.transports import work; work({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
        self.connection = Connection(ours.detach())
        self.known: set[int] = set()

    def call(self, user: User, ask: Ask, state: Payload) -> Payload:
        if user.number not in self.known:
            self.connection.send_bytes(pack({"user": _described(user)}))
            self.known.add(user.number)
        self.connection.send_bytes(pack({"ask": ask.to_payload(), "state": state}))
        return unpack(self.connection.recv_bytes())

    def close(self) -> None:
        self.process.kill()  # it holds nothing that is not here
        self.process.wait()
        self.connection.close()


def work(descriptor: int) -> None:
    """The life of a worker process: users' data once, then asks, until the other side is gone, even in the middle of a job."""
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    users: dict[int, User] = {}
    while True:
        message = unpack(inbox.get())
        if "user" in message:
            user = _restored(message["user"])
            users[user.number] = user
            continue
        ask = Ask(**message["ask"])
        try:
            reply, changes = perform(users[ask.user], ask, message["state"])
            answer: Payload = {"reply": reply, "changes": changes}
        except Exception as error:
            answer = {"failure": described_failure(error)}
        connection.send_bytes(pack(answer))


def _described(user: User) -> Payload:
    features = {stage: {"Z": Z, "fingerprint": fingerprint} for stage, (Z, fingerprint) in user.features.items()}
    plain = {name: getattr(user, name) for name in ("number", "X", "given", "C", "K", "seed", "truth")}
    return {**plain, "features": features}


def _restored(described: Payload) -> User:
    features = {stage: (part["Z"], part["fingerprint"]) for stage, part in described["features"].items()}
    return User(**{**described, "features": features})


class Faulty:
    """Any transport with faults, for tests: `fault(ask, tries)` names what befalls a delivery, or None.

    "message lost" and "reply lost"; "late": the message arrives after the next one, its reply never; "twice": delivered two times, the
    second reply counts; "garbled": the reply's bytes are cut; or a function that gets the reply and returns what arrives instead.
    """

    def __init__(self, transport: Transport, fault: Callable[[Ask, int], str | Callable[[Any], Any] | None]):
        self.transport, self.fault = transport, fault
        self.states, self.restore, self.close = transport.states, transport.restore, transport.close
        self._tries: Counter[tuple[int, int, int]] = Counter()
        self._held: dict[int, Ask] = {}

    def deliver(self, asks: Sequence[Ask], limits: Sequence[int]) -> Iterator[Payload | bytes | Failure]:
        for ask, limit in zip(asks, limits, strict=True):
            self._tries[ask.user, ask.start, ask.number] += 1
            fault = self.fault(ask, self._tries[ask.user, ask.start, ask.number])
            held = self._held.pop(ask.user, None)
            yield self._befallen(ask, limit, fault)
            if held is not None:
                self._once(held, limit)

    def _befallen(self, ask: Ask, limit: int, fault: str | Callable[[Any], Any] | None) -> Payload | bytes | Failure:
        if fault is None:
            return self._once(ask, limit)
        if callable(fault):
            return fault(self._once(ask, limit))  # type: ignore[no-any-return]
        if fault == "message lost":
            return Failure("no answer")
        if fault == "late":
            self._held[ask.user] = ask
            return Failure("no answer in time")
        outcome = self._once(ask, limit)
        if fault == "reply lost":
            return Failure("no answer")
        if fault == "twice":
            return self._once(ask, limit)
        if fault == "garbled":
            return outcome if isinstance(outcome, Failure) else (outcome if isinstance(outcome, bytes) else pack({"reply": outcome}))[:-7]
        raise ValueError(f"a fault must be one that Faulty knows, but it is {fault!r}")

    def _once(self, ask: Ask, limit: int) -> Payload | bytes | Failure:
        (outcome,) = self.transport.deliver([ask], [limit])
        return outcome
