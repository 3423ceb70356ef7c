from functools import partial

import numpy as np
import pytest

from fbnll.noise import NOISES, corrupt

TASK, OTHERS = (0, 1, 8, 9), (2, 3, 4, 5, 6, 7)  # CIFAR-10, two tasks
noisy = partial(corrupt, task=TASK, others=OTHERS, C=10)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def y(rng):
    """490 samples in each class of the task, 7 in each of the others."""
    return rng.permutation(np.concatenate([np.repeat(TASK, 490), np.repeat(OTHERS, 7)]))


@pytest.mark.parametrize("noise", NOISES)
def test_true_labels_stay_as_they_are_and_a_seed_gives_the_same_noise(y, noise):
    before = y.copy()
    given = [noisy(y, noise, rho=1, rng=np.random.default_rng(3)) for _ in range(2)]
    assert (y == before).all()
    assert (given[0] == given[1]).all()
    assert not np.shares_memory(given[0], y)


def test_no_noise_changes_nothing(y, rng):
    assert (noisy(y, "none", rng=rng) == y).all()


def test_class_independent_noise_gives_one_label_of_another_task_to_a_quarter_of_all_samples(y, rng):
    for _ in range(20):
        given = noisy(y, "class_independent", rng=rng)
        (target,) = set(given[given != y])
        true_already = (y == target).sum()
        assert target in OTHERS
        assert len(y) // 4 - true_already <= (given != y).sum() <= len(y) // 4
        changed = np.bincount(y[given != y], minlength=10)
        assert np.abs(changed[list(TASK)] - 122.5).max() < 45  # standard deviation 9


def test_noise_is_counted_exactly(rng):
    y = np.repeat(TASK, 25)
    for noise in ("class_independent", "class_dependent"):
        for alpha, expected in [(0, 0), (0.009, 0), (0.17, 17), (0.25, 25), (0.999, 99), (1, 100)]:
            assert (noisy(y, noise, alpha=alpha, rng=rng) != y).sum() == expected


def test_class_dependent_noise_takes_one_class_of_the_task(rng):
    y = np.repeat([*TASK, *OTHERS], 100)
    for _ in range(20):
        given = noisy(y, "class_dependent", alpha=0.1, rng=rng)
        (source,), (target,) = set(y[given != y]), set(given[given != y])
        assert source in TASK
        assert target in OTHERS
        assert (given != y).sum() == 100


def test_class_dependent_noise_overflows_to_another_class_with_the_same_target(y, rng):
    for _ in range(20):
        given = noisy(y, "class_dependent", rng=rng)  # 500 samples from classes of 490
        changed = np.bincount(y[given != y], minlength=10)
        assert sorted(changed[list(TASK)]) == [0, 0, 10, 490]
        assert not changed[list(OTHERS)].any()
        assert len(set(given[given != y])) == 1


def test_class_dependent_noise_takes_only_classes_that_the_user_has(rng):
    y = np.repeat([1, 4], [30, 10])
    given = noisy(y, "class_dependent", alpha=0.75, rng=rng)
    assert (given[:30] != 1).all()
    assert (given[30:] == 4).all()


def test_all_classes_and_all_targets_are_drawn(rng):
    y = np.repeat(TASK, 50)
    given = np.array([noisy(y, "class_dependent", rng=rng) for _ in range(300)])
    assert set(given[given != y]) == set(OTHERS)
    assert set(np.broadcast_to(y, given.shape)[given != y]) == set(TASK)


def test_uniform_noise_makes_a_share_rho_of_users_noisy(y, rng):
    shares = np.array([(noisy(y, "uniform", rng=rng) != y).mean() for _ in range(500)])
    assert (shares > 0).mean() == pytest.approx(0.4, abs=0.07)
    assert shares[shares > 0].min() > 0.2 * 0.9 - 0.03  # a tenth of the labels drawn are the true ones
    assert shares[shares > 0].mean() == pytest.approx(0.6 * 0.9, abs=0.04)


def test_uniform_noise_draws_from_all_classes_the_true_one_included(rng):
    y = np.repeat(TASK, 2500)
    given = noisy(y, "uniform", rho=1, beta=1, rng=rng)
    assert np.abs(np.bincount(given) - 1000).max() < 150  # standard deviation 30
    assert (given == y).mean() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("noise", ["class_independent", "class_dependent", "uniform"])
def test_a_coin_per_sample_selects_a_number_that_varies_around_the_share(rng, noise):
    y = np.repeat(TASK, 100)
    options = {"alpha": 0.2} if noise != "uniform" else {"rho": 1, "beta": 1}
    selected = [(noisy(y, noise, coin=True, rng=rng, **options) != y).sum() for _ in range(300)]
    mean, deviation = (80, 8) if noise != "uniform" else (360, 6)
    assert np.mean(selected) == pytest.approx(mean, abs=4 * deviation / np.sqrt(300))
    assert np.std(selected) == pytest.approx(deviation, rel=0.25)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("n", [0, 1])
def test_users_with_hardly_any_samples_are_served(rng, noise, n):
    y = np.zeros(n, int)
    assert noisy(y, noise, rng=rng).shape == (n,)


@pytest.mark.parametrize(
    ("noise", "options", "message"),
    [
        (
            "class_dependent",
            {"alpha": 0.9999},
            "class_dependent noise must find its samples in the user's task, but it needs 2001 and finds 1960",
        ),
        ("class_dependent", {"others": ()}, "class_dependent noise must find its target in another task, but there is only one task"),
        ("class_independent", {"others": ()}, "class_independent noise must find its target in another task"),
        ("asymmetric", {}, "noise must be one of class_independent, class_dependent, uniform, none, but it is 'asymmetric'"),
        ("none", {"alpha": 1.5}, "alpha must be between 0 and 1, but it is 1.5"),
        ("none", {"rho": -0.1}, "rho must be between 0 and 1, but it is -0.1"),
        ("none", {"beta": float("nan")}, "beta must be between 0 and 1, but it is nan"),
    ],
)
def test_wrong_arguments_are_named(y, rng, noise, options, message):
    with pytest.raises(ValueError, match=message):
        noisy(y, noise, rng=rng, **options)


@pytest.mark.parametrize("alpha", [0.07, 0.29, 0.55, 0.57, 0.58, 1.0])
def test_the_number_of_noisy_samples_is_exact_for_shares_that_binary_numbers_miss(alpha):
    y = np.zeros(100, int)
    given = corrupt(y, "class_independent", task=[0], others=[1], C=2, rng=np.random.default_rng(0), alpha=alpha)
    assert (given != y).sum() == round(100 * alpha)
