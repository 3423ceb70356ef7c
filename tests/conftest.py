"""One small scenario of real digits, and ways to run any method on it: the same for the tests of methods, transports and runs."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest

from fbnll.experiment import Experiment
from fbnll.federation import Federation, Round, federation
from fbnll.methods import load_method, settings_of
from fbnll.models import initial_weights
from fbnll.scenario import Scenario, simulated
from fbnll.transports import InProcess, Loopback, Processes

# q1 and tau_sim: both phases decide on some classes, and correcting twice would change labels again.
EXPERIMENT = Experiment(
    users=4, noise="class_dependent", model="softmax", rounds=2, epochs=1, clean_per_class=12, impurity=0.1, q1=5, tau_sim=0.7
).complete()
SGD = {name: asdict(EXPERIMENT)[name] for name in ("model", "stem", "epochs", "lr", "momentum", "weight_decay", "batch")} | {
    "device": "cpu"
}


@pytest.fixture(scope="session")
def scenario() -> Scenario:
    """Four users of digits, odd and even, with 100 samples each."""
    whole = simulated(EXPERIMENT, {"clustering": "raw", "correction": "raw"}, defaultdict(float))
    few = slice(0, 100)
    assert whole.true is not None
    features = {stage: [Z[few] for Z in parts] for stage, parts in whole.features.items()}
    X, given, true = ([part[few] for part in parts] for parts in (whole.X, whole.given, whole.true))
    return replace(whole, X=X, given=given, true=true, features=features)


def members(scenario: Scenario, transport) -> Federation:
    return federation(transport, K=len(scenario.X), C=len(scenario.classes), phi=scenario.phi, seed=EXPERIMENT.seed)


def program(name: str, fed: Federation, scenario: Scenario, since: Round | None = None, rounds: int = 2, **changes) -> Iterator[Round]:
    """The method as a run would start it."""
    method = load_method(name)
    settings = {**asdict(EXPERIMENT), "M": scenario.M, "sgd": SGD, "rounds": rounds, **changes}
    shape = scenario.X[0].shape[1:]

    def init(rng):
        return initial_weights("softmax", len(scenario.classes), shape, rng)

    return method(fed, scenario.reference, init, since=since, **{k: v for k, v in settings.items() if k in settings_of(method)})


def labels_now(fed: Federation) -> list[np.ndarray]:
    """Every user's labels in the state that the server has a reply to."""
    users = fed.server.transport.users
    return [users[k].states.get(fed.server.named.get(k, ""), {}).get("labels", users[k].given) for k in sorted(users)]


def bits(value) -> object:
    """Something that is equal when, and only when, every bit of arrays is."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, Round):
        return bits([value.number, value.clusters, value.models, value.memory])
    return value


def states_now(fed: Federation) -> object:
    users = fed.server.transport.users
    return bits([users[k].states.get(fed.server.named.get(k, ""), {}) for k in sorted(users)])


@pytest.fixture(scope="session")
def workers(scenario: Scenario) -> Iterator[Processes]:
    transport = Processes(scenario.users(EXPERIMENT.seed), workers=2)
    yield transport
    transport.close()


@pytest.fixture(params=["inprocess", "loopback", "processes"])
def transport(request, scenario: Scenario):
    """Every transport with fresh users; the processes are started once."""
    if request.param != "processes":
        return (InProcess if request.param == "inprocess" else Loopback)(scenario.users(EXPERIMENT.seed))
    started = request.getfixturevalue("workers")
    for user in started.users.values():
        user.states, user.seen = {"": {}}, (-1, -1)
    return started


@pytest.fixture
def fed(scenario: Scenario, transport) -> Federation:
    return members(scenario, transport)
