"""What every method must pass on every transport."""

from dataclasses import replace

import numpy as np
import pytest

from conftest import EXPERIMENT, bits, labels_now, members, program, states_now
from fbnll import evaluation
from fbnll.federation import TooManyMissing, checkpoint, resume
from fbnll.methods import METHODS, load_method
from fbnll.models import initial_weights
from fbnll.payload import pack, unpack
from fbnll.training import predict
from fbnll.transports import Faulty, InProcess, Loopback

every_method = pytest.mark.parametrize("name", METHODS)
FAULTS = ("message lost", "reply lost", "late", "twice")


def fresh(scenario, wrap=lambda inner: inner):
    return members(scenario, wrap(InProcess(scenario.users(EXPERIMENT.seed))))


@pytest.fixture(params=["inprocess", "loopback", "processes"])
def new_fed(request, scenario):
    """A function that gives a federation of fresh users, on each transport in turn; worker processes are started once."""

    def new(of=scenario):
        if request.param != "processes" or of is not scenario:
            return members(of, (InProcess if request.param == "inprocess" else Loopback)(of.users(EXPERIMENT.seed)))
        started = request.getfixturevalue("workers")
        for user in started.users.values():
            user.states, user.seen = {"": {}}, (-1, -1)
        return members(of, started)

    return new


def outcome(fed, rounds):
    return bits(list(rounds)), states_now(fed)


@pytest.fixture(scope="module")
def expected(scenario):
    """Each method's Rounds and states in process, run once."""
    results = {}
    for name in METHODS:
        fed = fresh(scenario)
        results[name] = outcome(fed, program(name, fed, scenario))
    return results


@every_method
def test_every_transport_gives_a_round_before_and_after_each_and_the_same_bits(name, fed, scenario, expected):
    rounds = list(program(name, fed, scenario))
    assert [since.number for since in rounds] == [0, 1, 2]
    assert all(len(since.clusters) == fed.K for since in rounds)
    assert (bits(rounds), states_now(fed)) == expected[name]


@every_method
def test_an_evaluation_in_between_changes_no_bit(name, scenario, new_fed, expected):
    fed = new_fed()
    shape, C = scenario.X[0].shape[1:], len(scenario.classes)
    template = initial_weights("softmax", C, shape, np.random.default_rng(0))
    rounds = []
    for since in program(name, fed, scenario):
        evaluation.label_noise(fed)
        accuracies = evaluation.user_accuracies(fed, since, scenario.truth, lambda w, X: predict(w, X, model="softmax", C=C), template)
        assert since.number == 0 or (accuracies > 0.1).all()
        rounds.append(since)
    assert (bits(rounds), states_now(fed)) == expected[name]


@every_method
def test_stopped_after_every_round_and_continued_it_gives_the_same_bits(name, scenario, new_fed, expected):
    saved, rounds = None, []
    for _ in range(3):
        fed = new_fed()
        since = resume(fed, unpack(saved)) if saved else None
        rounds.append(next(program(name, fed, scenario, since)))
        saved = pack(checkpoint(fed, rounds[-1]))
    assert (bits(rounds), states_now(fed)) == expected[name]


@every_method
def test_random_truth_changes_no_bit_of_any_method_but_those_that_use_it(name, scenario, new_fed, expected):
    rng = np.random.default_rng(0)
    true = [rng.permutation(10)[labels] for labels in scenario.true]
    liars = replace(scenario, true=true, truth=replace(scenario.truth, tau=1 - scenario.truth.tau))
    fed = new_fed(liars)
    result = outcome(fed, program(name, fed, liars))
    assert (result == expected[name]) is (name not in ("oracle", "clean"))


@every_method
@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_at_each_ask_in_turn_it_ends_well_and_resumes_to_the_same_bits(name, fault, scenario):
    """In a run of one user fewer, or with one more try, and never with labels corrected twice; users answer in bytes."""
    asked = []
    list(
        program(
            name, fresh(scenario, lambda inner: Faulty(inner, lambda ask, tries: asked.append((ask.user, ask.job, ask.count)))), scenario
        )
    )
    for unlucky in asked:

        def fate(ask, tries, unlucky=unlucky):
            return fault if (ask.user, ask.job, ask.count) == unlucky and tries == 1 else None

        def run(stops, fate=fate):
            try:
                saved, rounds = None, []
                for stop in stops:
                    fed = members(scenario, WithUsers(Loopback(scenario.users(EXPERIMENT.seed)), fate))
                    since = resume(fed, unpack(saved)) if saved else None
                    for current in program(name, fed, scenario, since):
                        rounds.append(current)
                        if len(rounds) == stop:
                            break
                    saved = pack(checkpoint(fed, rounds[-1]))
                return bits(rounds), states_now(fed)
            except TooManyMissing as error:
                return str(error)

        whole = run([3])
        assert run([1, 2, 3]) == whole, unlucky
        assert isinstance(whole, str) or len(whole[0]) == 3


class WithUsers(Faulty):
    """A faulty transport whose users a test can look at."""

    def __init__(self, inner, fault):
        super().__init__(inner, fault)
        self.users = inner.users


def test_a_lost_one_shot_ask_costs_nothing(scenario, expected):
    fed = fresh(
        scenario, lambda inner: WithUsers(inner, lambda ask, tries: "reply lost" if tries == 1 and "train" not in ask.job else None)
    )
    assert outcome(fed, program("fb_nll", fed, scenario)) == expected["fb_nll"]


def test_a_user_that_never_answers_is_left_out_and_the_others_are_as_without_it(scenario):
    fed = fresh(scenario, lambda inner: WithUsers(inner, lambda ask, tries: "message lost" if ask.user == 2 else None))
    rounds = list(program("fb_nll", fed, scenario))
    assert rounds[-1].clusters[2] == -1
    without = fresh(scenario).only([0, 1, 3])
    alone = list(program("fb_nll", without, scenario))
    np.testing.assert_array_equal(rounds[-1].clusters, alone[-1].clusters)
    assert bits(rounds[-1].models) == bits(alone[-1].models)
    for k, (labels, others) in enumerate(zip(labels_now(fed), labels_now(without))):
        assert k == 2 or (labels == others).all()


def test_a_second_correction_would_change_labels(scenario):
    """So that the tests above could fail."""
    fed = fresh(scenario)
    list(program("fb_nll", fed, scenario, rounds=0))
    once = labels_now(fed)
    from fbnll.methods.fb_nll import correct_labels

    correct_labels(fed, scenario.reference, EXPERIMENT.q1, EXPERIMENT.l, EXPERIMENT.tau_sim)
    assert any((a != b).any() for a, b in zip(once, labels_now(fed)))


def test_only_declared_replies_leave_a_user_and_none_depends_on_its_number_of_samples(scenario):
    """Recorded messages of clustering and correction, of users with all and with half of their samples."""

    def recorded(share):
        part = {stage: [Z[: int(len(Z) * share)] for Z in parts] for stage, parts in scenario.features.items()}
        cut = {name: [v[: int(len(v) * share)] for v in getattr(scenario, name)] for name in ("X", "given", "true")}
        fed = fresh(replace(scenario, features=part, **cut))
        messages = []
        inner = fed.server.transport.deliver

        def deliver(asks, limits):
            for ask, reply in zip(asks, inner(asks, limits)):
                messages.append((ask.user, ask.job.partition(":")[2], reply))
                yield reply

        fed.server.transport.deliver = deliver
        list(program("fb_nll", fed, scenario, rounds=0))
        return fed, messages

    fed, whole = recorded(1)
    _, half = recorded(0.5)
    declared = {"top_eigenvectors": {"V"}, "relevances": {"r"}, "class_signatures": {"V"}, "relabel": set()}
    assert {job: set(reply) for _, job, reply in whole} == declared
    assert [len(pack(reply)) for *_, reply in whole] == [len(pack(reply)) for *_, reply in half]
    for k, _, reply in whole:
        Z = fed.server.transport.users[k].features["clustering"][0].astype(float)
        lam = np.linalg.eigvalsh(Z.T @ Z / len(Z))[-10:]
        for part in reply.values():
            values = part.ravel().astype(float)
            assert not np.isclose(values[:, None], lam[lam > 1], rtol=1e-4).any()  # no eigenvalue
            if part.ndim > 1:  # directions only: columns of unit length, or none
                lengths = np.linalg.norm(part.astype(float), axis=-2)
                assert np.all(np.isclose(lengths, 1, atol=1e-5) | (lengths == 0))


def test_relevances_are_the_same_bits_under_any_labels(scenario):
    rng = np.random.default_rng(0)
    shuffled = replace(scenario, given=[rng.integers(0, 10, len(y)) for y in scenario.given])
    R = [next(program("fb_nll_minus", fresh(s), s)).memory["R"] for s in (scenario, shuffled)]
    assert R[0].tobytes() == R[1].tobytes()


def test_slots_of_class_signatures_are_shuffled_and_unknown_to_the_server(scenario):
    from fbnll.federation import generator
    from fbnll.methods.fb_nll import class_signatures

    fed = fresh(scenario)
    list(program("fb_nll", fed, scenario, rounds=0))
    slots = [user.states[fed.server.named[k]]["slots"] for k, user in fed.server.transport.users.items()]
    assert all(sorted(order) == list(range(10)) for order in slots)
    assert len({tuple(order) for order in slots}) == len(slots)
    for k, order in enumerate(slots):
        assert (generator(fed.seed, class_signatures.mark.name, k, 0).permutation(10) != order).any()


HOSTILE = {
    "relevances above 1": ("relevances", lambda reply: {"r": np.full_like(reply["r"], 5.0)}, "must be from 0 to 1, but it is not"),
    "enormous relevances": ("relevances", lambda reply: {"r": np.full_like(reply["r"], 1.7e308)}, "must be from 0 to 1"),
    "long eigenvectors": ("top_eigenvectors", lambda reply: {"V": reply["V"] * 3}, "must be orthonormal, but it is not"),
    "one direction ten times": ("top_eigenvectors", lambda reply: {"V": np.repeat(reply["V"][:, :1], 10, 1)}, "must be orthonormal"),
    "NaN": ("top_eigenvectors", lambda reply: {"V": reply["V"] * np.nan}, "has NaN or infinities"),
    "long class signatures": ("class_signatures", lambda reply: {"V": reply["V"] * 2}, "must be orthonormal"),
    "a negative number of samples": ("sample_count", lambda reply: {"n": np.array(-300)}, "must be not negative"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_well_formed_lie_that_cannot_be_true_is_refused_and_the_others_go_on(what, scenario, caplog):
    job, lie, words = HOSTILE[what]

    def fault(ask, tries):
        return lie if ask.user == 1 and ask.job.endswith(f":{job}") else None

    fed = fresh(scenario, lambda inner: WithUsers(inner, fault))
    last = list(program("fb_nll", fed, scenario, weighted=True))[-1]
    assert words in caplog.text
    assert "failed on 1 of 4 users: user 1: ValueError" in caplog.text
    assert (last.clusters[[0, 2, 3]] >= 0).all()
    assert all(np.isfinite(part).all() for w in last.models for part in w.values())


def test_a_user_whose_number_of_samples_was_lost_is_asked_again(scenario):
    fed = fresh(scenario, lambda inner: WithUsers(inner, lambda ask, tries: "message lost" if ask.user == 1 and ask.number < 4 else None))
    last = list(program("fedavg", fed, scenario, rounds=3, weighted=True))[-1]
    assert last.memory["n"].tolist() == [100] * 4


def test_participation_trains_a_share_of_every_cluster_and_weights_follow_samples(scenario):
    fed = fresh(scenario)
    list(program("oracle", fed, scenario, participation=0.5))
    assert sum(counted["asks"] for job, counted in fed.server.traffic.items() if job.endswith(":train")) == 4
    weighted = fresh(scenario)
    equal = [list(program("oracle", f, scenario, weighted=w)) for f, w in ((weighted, True), (fresh(scenario), False))]
    assert any(job.endswith("sample_count") for job in weighted.server.traffic)
    for name, part in equal[0][-1].models[0].items():
        np.testing.assert_allclose(part, equal[1][-1].models[0][name], atol=1e-6)  # all users have 100 samples


def test_clustered_fedavg_is_fedavg_inside_each_cluster(scenario):
    from fbnll.federation import per_cluster

    fed = fresh(scenario)
    together = list(program("oracle", fed, scenario))[-1]
    apart = list(per_cluster(fresh(scenario), lambda part, since: program("fedavg", part, scenario, since), together.clusters))[-1]
    assert bits(together.models) == bits(apart.models)


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match=r"method must be one of fb_nll, .* but it is 'fedsgd'"):
        load_method("fedsgd")
