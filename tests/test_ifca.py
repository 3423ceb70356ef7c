import logging

import numpy as np
import pytest

from conftest import EXPERIMENT, SGD, bits, members, program
from fbnll.methods import ifca
from fbnll.methods.ifca import initial_clusters, losses, nearest, reassociated
from fbnll.models import initial_weights
from fbnll.training import predict
from fbnll.transports import InProcess

NAN = np.nan


@pytest.fixture
def fed(scenario):
    return members(scenario, InProcess(scenario.users(EXPERIMENT.seed)))


def weights(seed):
    return initial_weights("softmax", 10, (8, 8, 1), np.random.default_rng(seed))


def test_with_one_cluster_it_is_fedavg(scenario):
    feds = [members(scenario, InProcess(scenario.users(EXPERIMENT.seed))) for _ in range(2)]
    one = ifca.ifca_pfl(feds[0], None, lambda rng: weights(0), M=1, rounds=2, sgd=SGD)
    from fbnll.methods.fedavg import fedavg

    assert bits(list(one)[-1].models) == bits(list(fedavg(feds[1], None, lambda rng: weights(0), rounds=2, sgd=SGD))[-1].models)


def test_a_loss_is_the_mean_cross_entropy_over_all_samples_of_the_user(scenario, fed):
    w = [weights(0), weights(1)]
    L = ifca.loss_table(fed, w, SGD)
    for k in range(fed.K):
        for m in range(2):
            logp = predict(w[m], scenario.X[k], model="softmax", C=10)
            assert L[k, m] == pytest.approx(-np.mean([row[c] for row, c in zip(logp, scenario.given[k])]), rel=1e-6)


def test_every_user_is_in_the_cluster_of_its_least_loss_where_none_is_empty():
    L = np.array([[0.1, 0.5], [0.6, 0.2], [0.3, 0.4]])
    for before in ([0, 0, 1], [1, 1, 0]):
        assert reassociated(L, np.array(before)).tolist() == [0, 1, 0]


def test_permuting_the_models_permutes_the_clusters():
    rng = np.random.default_rng(0)
    L = rng.random((30, 3))
    order = np.array([2, 0, 1])
    assert (order[nearest(L[:, order])] == nearest(L)).all()


def test_equal_models_keep_the_sizes_and_the_first_users_come_first():
    before = np.array([1, 0, 1, 2, 1])
    assert reassociated(np.ones((5, 3)), before).tolist() == [0, 1, 1, 1, 2]


def test_the_fallback_lets_clusters_choose_in_turn_among_those_that_are_left():
    """All prefer model 0. Cluster 0 had one user and takes user 2; cluster 1 had two and takes its nearest of the others."""
    L = np.array([[0.3, 0.9, 0.8], [0.4, 0.6, 0.9], [0.1, 0.5, 0.5], [0.2, 0.7, 0.9]])
    assert reassociated(L, np.array([1, 1, 0, 2])).tolist() == [2, 1, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_fallback_keeps_the_size_of_every_cluster_and_no_cluster_is_ever_empty(seed):
    rng = np.random.default_rng(seed)
    K, M = 12, int(rng.integers(2, 6))
    before = rng.permutation(np.r_[np.arange(M), rng.integers(0, M, K - M)])
    L = rng.random((K, M))
    assert len(set(reassociated(L, before))) == M
    L[:, rng.integers(M)] += 1  # nobody prefers this one
    np.testing.assert_array_equal(np.bincount(reassociated(L, before)), np.bincount(before))


def test_a_user_that_does_not_answer_keeps_its_cluster():
    L = np.array([[0.1, 0.5], [NAN, NAN], [0.3, 0.4], [0.2, 0.9]])
    assert reassociated(L, np.array([0, 1, 0, 0])).tolist() == [0, 1, 0, 0]
    assert reassociated(L, np.array([0, -1, 1, 0])).tolist() == [0, -1, 1, 0]


def test_models_are_drawn_until_every_cluster_has_a_user(fed):
    drawn = []

    def init(rng):
        drawn.append(len(drawn))
        return weights(0 if len(drawn) <= 2 else len(drawn))  # the first two are the same: everybody joins the first

    m, w = initial_clusters(fed, init, 2, SGD, 50)
    assert set(m) == {0, 1}
    assert len(drawn) > 2
    assert bits(w) == bits([weights(len(drawn) - 1), weights(len(drawn))])


def test_after_so_many_draws_users_are_dealt_and_it_is_told(fed, caplog):
    with caplog.at_level(logging.WARNING, "fbnll"):
        m, _ = initial_clusters(fed, lambda rng: weights(0), 2, SGD, 3)
    assert sorted(m.tolist()) == [0, 0, 1, 1]
    assert "no 2 random models in 3 draws gave every cluster a user" in caplog.text
    assert fed.server.traffic[losses.mark.name]["asks"] == 3 * fed.K


def test_no_cluster_is_empty_after_any_round(scenario, fed):
    for since in program("ifca_pfl", fed, scenario, rounds=3):
        assert set(since.clusters) == {0, 1}
