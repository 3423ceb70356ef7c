from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import fbnll
from fbnll.data import load
from fbnll.experiment import Experiment
from fbnll.features import feature_map
from fbnll.scenario import deal, from_samples, simulated, stages_of

DIGITS = load("digits")


def test_the_same_seed_deals_the_same_and_another_one_differently():
    first, again, other = (deal(Experiment(seed=seed).complete(), DIGITS.y_train, 10) for seed in (0, 0, 1))
    for k in range(20):
        np.testing.assert_array_equal(first.parts.users[k], again.parts.users[k])
        np.testing.assert_array_equal(first.given[k], again.given[k])
    assert any(not np.array_equal(a, b) for a, b in zip(first.parts.users, other.parts.users))


def test_noise_of_one_user_does_not_depend_on_that_of_others():
    alike = deal(Experiment(noise="class_dependent").complete(), DIGITS.y_train, 10)
    mixed = deal(Experiment(noise="class_dependent,none").complete(), DIGITS.y_train, 10)
    for k in range(20):
        expected = alike.given[k] if k % 2 == 0 else DIGITS.y_train[mixed.parts.users[k]]
        np.testing.assert_array_equal(mixed.given[k], expected)


def test_the_example_of_noise_shows_one_user_under_every_model_that_it_can_have():
    example = deal(Experiment(seed=0).complete(), DIGITS.y_train, 10).noise_example
    tables = {name: np.array(counts) for name, counts in example["models"].items()}
    assert list(tables) == ["clean", "class_independent", "class_dependent", "uniform"]
    n = tables["clean"].trace()
    assert all(table.sum() == n for table in tables.values())
    assert tables["class_independent"].sum() - tables["class_independent"].trace() == n // 4
    assert tables["uniform"].trace() < n
    one_task = deal(Experiment(tasks=1, noise="uniform").complete(), DIGITS.y_train, 10).noise_example
    assert list(one_task["models"]) == ["clean", "uniform"]


def test_models_are_trained_on_the_data_or_on_features():
    stages = {"clustering": "raw", "correction": "raw"}
    data, features = (simulated(replace(Experiment().complete(), inputs=i), stages, defaultdict(float)) for i in ("data", "correction"))
    assert data.X[0].shape[1:] == (8, 8, 1)
    assert features.X[0].shape[1:] == (64,)
    np.testing.assert_array_equal(features.truth.X_test, data.truth.X_test.reshape(-1, 64))
    assert features.reference.X.shape == (100, 64)


def test_only_the_features_that_the_methods_need_are_computed():
    e = Experiment().complete()
    assert stages_of(e, ["fedavg", "clean"]) == {}
    assert stages_of(e, ["fb_nll_minus"]) == {"clustering": "raw"}
    assert stages_of(e, ["fedavg", "fb_nll"]) == {"clustering": "raw", "correction": "raw"}
    assert stages_of(replace(e, inputs="correction"), ["fedavg"]) == {"correction": "raw"}


def people(n=40):
    rng = np.random.default_rng(0)
    y = [rng.choice(task, n) for task in ((0, 1), (0, 1), (2, 3), (2, 3))]
    users = [((np.eye(8)[labels] * 4 + rng.normal(size=(n, 8))).astype(np.float32), labels) for labels in y]
    y_s = np.repeat(np.arange(4), 20)
    return users, ((np.eye(8)[y_s] * 4 + rng.normal(size=(80, 8))).astype(np.float32), y_s)


QUICK = Experiment(tasks=2, q=4, q1=2, l=2, rounds=0)


def test_features_may_be_functions():
    users, reference = people()
    seen = []

    def halves(X):
        seen.append(len(X))
        return X[:, :4] / 2

    result = fbnll.run(QUICK, users=users, reference=reference, phi={"clustering": halves, "correction": "raw"})
    assert result.clusters.tolist() == [0, 0, 1, 1]
    assert seen == [4 * 40 + 80]
    with pytest.raises(ValueError, match="phi must be for the stages clustering and correction, but it is for 'training'"):
        fbnll.run(QUICK, users=users, reference=reference, phi={"training": halves})
    with pytest.raises(ValueError, match="q must be at most the feature dimension, but q is 4 and features have 2 columns"):
        fbnll.run(QUICK, users=users, reference=reference, phi={"clustering": lambda X: X[:, :2]})


def test_functions_as_features_leave_their_name_in_the_run_folder(tmp_path):
    users, reference = people()
    own = feature_map(lambda X: X, fingerprint="mine-1")
    fbnll.run(QUICK, users=users, reference=reference, phi={"clustering": own}, out=tmp_path / "run")
    assert own.name in (tmp_path / "run" / "config.json").read_text()


def test_a_saved_array_holds_the_rows_of_all_users_in_turn_and_then_of_the_clean_set(tmp_path):
    users, reference = people()
    whole = np.concatenate([X for X, _ in [*users, reference]])
    np.save(tmp_path / "features.npy", whole[:, ::-1])
    e = replace(QUICK, phi_clustering=str(tmp_path / "features.npy"), users=4).complete()
    scenario = from_samples(e, users, reference, stages_of(e, ["fb_nll"]))
    for k, (X, _) in enumerate(users):
        np.testing.assert_array_equal(scenario.features["clustering"][k], X[:, ::-1])
    np.testing.assert_array_equal(scenario.reference.features, reference[0])


def test_bytes_and_numbers_are_not_mixed():
    users, reference = people()
    users[1] = (users[1][0].astype(np.uint8), users[1][1])
    with pytest.raises(ValueError, match="samples of all users must be of one type, but they are float32 and uint8"):
        fbnll.run(QUICK, users=users, reference=reference)
