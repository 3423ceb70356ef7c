import numpy as np
import pytest

from fbnll import evaluation
from fbnll.evaluation import Truth, accuracy_summary, clustering_agreement, label_changes, label_noise, user_accuracies
from fbnll.federation import Round, User, federation
from fbnll.transports import Loopback

TRUTH = Truth(((0, 1), (2,)), np.array([0, 0, 1]), np.array([[0.0], [1.0], [0.0], [2.0], [2.0]]), np.array([0, 1, 1, 2, 0]))


def users_with(true, given, now=None, phase=None):
    users = []
    for k, (t, g) in enumerate(zip(true, given)):
        user = User(k, np.zeros((len(g), 1)), np.array(g, np.int64), {}, 3, len(true), truth={"labels": np.array(t, np.int64), "task": 0})
        if now is not None:
            user.states[""] = {"labels": np.array(now[k], np.int64), "phase": np.array(phase[k], np.int64)}
        users.append(user)
    return users


def asked(users):
    return federation(Loopback(users), K=len(users), C=3)


def named(w, X):
    """A model that is one number: it says that class for every sample, or the sample itself for −1."""
    predicted = X[:, 0] if w["w"][0] < 0 else np.full(len(X), w["w"][0])
    return np.eye(3)[predicted.astype(int)]


def test_counts_of_labels_by_hand():
    """User 0: kept, missed, repaired, broken, changed to another wrong one; user 1 has no samples."""
    fed = asked(users_with([[0, 0, 1, 2, 0], []], [[0, 1, 0, 2, 1], []], [[0, 1, 1, 1, 2], []], [[1, 2, 2, 1, 2], []]))
    labels, details = label_noise(fed)
    (user, empty) = labels["per_user"]
    assert user == {"user": 0, "n": 5, "before": 3 / 5, "after": 3 / 5, "missed": 1, "repaired": 1, "broken": 1, "mistaken": 1}
    assert (empty["n"], empty["before"], empty["after"]) == (0, None, None)
    assert (labels["noise_before"], labels["worst_user_after"], labels["wrong_before"]) == (3 / 5, 3 / 5, 3)
    assert details["flow"]["given_corrected"] == [[1, 1, 0], [0, 1, 1], [0, 1, 0]]
    assert details["flow"]["true_given"] == [[1, 2, 0], [1, 0, 0], [0, 0, 1]]
    assert details["phases"]["repaired"] == {"phase1": 0, "phase2": 1}
    assert details["phases"]["broken"] == {"phase1": 1, "phase2": 0}


def test_of_users_whose_truth_nobody_knows_it_is_told_what_was_changed_and_by_which_phase():
    users = [*users_with([[0, 0]], [[0, 0]], [[1, 1]], [[1, 1]]), User(1, np.zeros((2, 1)), np.array([0, 2]), {}, 3, 2)]
    for user in users:
        user.truth = {}
    changes = label_changes(asked(users))
    assert changes["flow"] == {"given_corrected": [[1, 2, 0], [0, 0, 0], [0, 0, 1]]}
    assert changes["phases"]["per_class"][0] == {"class": 0, "absent": 0, "phase1_kept": 0, "phase1_relabelled": 1, "phase2": 0}
    assert label_changes(asked(users_with([[0, 0]], [[0, 1]]))) == {}


def test_accuracy_is_the_share_of_all_test_samples_of_the_users_own_task_over_all_outputs():
    since = Round(1, np.array([0, 1, 1]), [{"w": np.array([-1.0])}, {"w": np.array([2.0])}])
    fed = asked(users_with([[]] * 3, [[]] * 3))
    accuracies = user_accuracies(fed, since, TRUTH, named, {})
    # Task 0 has the samples 0, 1, 0, 2 with labels 0, 1, 1, 0; task 1 has one sample, 2.
    np.testing.assert_allclose(accuracies, [2 / 4, 0, 1])
    summary = accuracy_summary(accuracies, TRUTH)
    assert summary["mean"] == pytest.approx(0.5)
    assert [task["mean"] for task in summary["per_task"]] == [0.25, 1.0]


def test_a_pair_of_model_and_task_is_computed_once():
    calls = []

    def counting(w, X):
        calls.append(len(X))
        return named(w, X)

    since = Round(1, np.array([0, 0, 0]), [{"w": np.array([-1.0])}])
    user_accuracies(asked(users_with([[]] * 3, [[]] * 3)), since, TRUTH, counting, {})
    assert sorted(calls) == [1, 4]


def test_users_without_a_model_are_not_scored_and_their_number_is_told():
    since = Round(1, np.array([0, -1, -1]), [{"w": np.array([-1.0])}])
    accuracies = user_accuracies(asked(users_with([[]] * 3, [[]] * 3)), since, TRUTH, named, {})
    summary = accuracy_summary(accuracies, TRUTH)
    assert summary["users_scored"] == 1
    assert summary["per_user"] == [0.5, None, None]
    assert summary["per_task"][1]["mean"] is None
    assert accuracy_summary(np.full(3, np.nan), TRUTH)["mean"] is None


def test_agreement_of_clusters_is_null_where_nobody_has_one():
    assert clustering_agreement(np.full(3, -1), TRUTH.tau) == {"ari": None, "matched": None}
    assert clustering_agreement(np.array([1, 1, 0]), TRUTH.tau) == {"ari": 1.0, "matched": 1.0}


def test_jobs_of_the_evaluation_alone_see_the_truth():
    from fbnll.federation import Desk, mark_of
    from fbnll.methods.fedavg import train

    user = users_with([[0]], [[1]])[0]
    assert Desk(user, mark_of(evaluation.label_counts), {}).truth["task"] == 0
    assert not hasattr(Desk(user, mark_of(train), {}), "truth")
