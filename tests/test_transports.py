import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from conftest import EXPERIMENT, bits, members, program, states_now
from fbnll import transports
from fbnll.federation import Ask, Failure
from fbnll.methods.fedavg import sample_count
from fbnll.transports import Faulty, InProcess, Processes


def gone(pid: int) -> bool:
    """Whether a process has ended, also one that waits to be collected by a parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def eventually(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def expected(scenario):
    fed = members(scenario, InProcess(scenario.users(EXPERIMENT.seed)))
    return bits(list(program("fb_nll", fed, scenario, rounds=3))), states_now(fed)


@pytest.fixture
def processes(scenario):
    transport = Processes(scenario.users(EXPERIMENT.seed), workers=2)
    yield transport
    transport.close()


def test_a_worker_killed_between_rounds_is_replaced_and_its_jobs_run_again(scenario, processes, expected):
    fed = members(scenario, processes)
    rounds = []
    for since in program("fb_nll", fed, scenario, rounds=3):
        rounds.append(since)
        victim = processes.workers[since.number % 2].process
        os.kill(victim.pid, signal.SIGKILL)
    assert (bits(rounds), states_now(fed)) == expected


def test_a_worker_killed_in_the_middle_of_a_job_is_replaced_and_the_job_runs_again(scenario, processes, expected):
    fed = members(scenario, processes)
    method = program("fb_nll", fed, scenario, rounds=3)
    rounds = [next(method)]
    victim = processes.workers[1].process
    os.kill(victim.pid, signal.SIGSTOP)  # it will hold a job, and not finish it
    threading.Timer(0.5, os.kill, (victim.pid, signal.SIGKILL)).start()
    rounds += method
    assert processes.workers[1].process.pid != victim.pid
    assert (bits(rounds), states_now(fed)) == expected


def test_a_job_whose_worker_dies_every_time_is_given_up(scenario, processes, monkeypatch):
    started = []

    class Doomed(transports.Worker):
        def __init__(self):
            super().__init__()
            started.append(self.process.pid)
            self.process.kill()

    monkeypatch.setattr(transports, "Worker", Doomed)
    (outcome,) = processes.deliver([Ask(0, sample_count.mark.name, {}, 0, 1, 0, "", "", None)], [10_000])
    assert outcome == Failure(f"its worker died {transports.DEATHS} times")
    assert len(started) == transports.DEATHS


def test_closing_ends_every_worker_and_closed_it_delivers_nothing(scenario, processes):
    fed = members(scenario, processes)
    assert len(fed.ask_all(sample_count)) == 4
    pids = [worker.process.pid for worker in processes.workers]
    processes.close()
    assert all(gone(pid) for pid in pids)


def test_no_worker_survives_a_killed_parent():
    script = """
        import os, signal, sys
        import numpy as np
        from fbnll.federation import User, federation
        from fbnll.methods.fedavg import sample_count
        from fbnll.transports import Processes
        users = [User(k, np.zeros((2, 3), np.float32), np.zeros(2, np.int64), {}, 2, 2) for k in range(2)]
        transport = Processes(users, 2)
        assert len(federation(transport, K=2, C=2).ask_all(sample_count)) == 2
        print(*[worker.process.pid for worker in transport.workers], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, check=False)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert ended.returncode == -signal.SIGKILL
    assert len(pids) == 2
    assert eventually(lambda: all(gone(pid) for pid in pids))


def test_an_unknown_fault_is_refused(scenario):
    fed = members(scenario, Faulty(InProcess(scenario.users(0)), lambda ask, tries: "lost"))
    with pytest.raises(ValueError, match="a fault must be one that Faulty knows, but it is 'lost'"):
        fed.ask_all(sample_count)
