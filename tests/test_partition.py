import numpy as np
import pytest

from fbnll.partition import TASKS, partition, tasks_of


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def labels(per_class=100, C=10):
    return np.repeat(np.arange(C), per_class)


def test_the_paper_s_tasks_are_disjoint_and_cover_all_classes():
    assert set(TASKS) == {"cifar10", "svhn", "digits", "fashion_mnist"}
    for dataset in TASKS:
        for M in (2, 3, 5):
            tasks = tasks_of(dataset, M, C=10)
            assert len(tasks) == M
            assert sorted(sum(tasks, ())) == list(range(10))


def test_the_paper_s_tasks_are_those_of_its_table():
    assert tasks_of("cifar10", 2, 10) == ((0, 1, 8, 9), (2, 3, 4, 5, 6, 7))
    assert tasks_of("cifar10", 3, 10) == ((0, 1, 8), (9, 2, 3), (4, 5, 6, 7))
    assert tasks_of("cifar10", 5, 10) == ((0, 1), (8, 9), (2, 3), (4, 5), (6, 7))
    assert tasks_of("svhn", 2, 10) == ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))
    assert tasks_of("svhn", 3, 10) == ((0, 2, 4), (6, 8, 1), (3, 5, 7, 9))
    assert tasks_of("svhn", 5, 10) == ((0, 2), (4, 6), (8, 1), (3, 5), (7, 9))


def test_one_task_is_all_classes_of_any_dataset():
    assert tasks_of("cifar100", 1, 4) == ((0, 1, 2, 3),)


def test_any_split_can_be_given():
    assert tasks_of("mine", [[3, 0], np.array([1])], 5) == ((3, 0), (1,))


@pytest.mark.parametrize(
    ("dataset", "tasks", "message"),
    [
        ("cifar10", 4, "tasks of cifar10 must be 1, 2, 3, 5 or a list of the classes of every task, but it is 4"),
        ("cifar100", 2, "tasks of cifar100 must be 1 or a list of the classes of every task, but it is 2"),
        ("mine", [[0, 1], [1, 2]], "tasks must not share classes, but class 1 is there 2 times"),
        ("mine", [[0, 0], [1]], "tasks must not share classes, but class 0 is there 2 times"),
        ("mine", [[0], [3]], "classes of a task must be integers from 0 to 2, but one is 3"),
        ("mine", [[-1], [1]], "classes of a task must be integers from 0 to 2, but one is -1"),
        ("mine", [["0"], [1]], "classes of a task must be integers from 0 to 2, but one is '0'"),
        ("mine", [[0], []], "every task must be a list of classes, and not empty"),
        ("mine", [], "every task must be a list of classes, and not empty"),
    ],
)
def test_a_wrong_split_is_named(dataset, tasks, message):
    with pytest.raises(ValueError, match=message):
        tasks_of(dataset, tasks, C=3)


@pytest.mark.parametrize(
    ("K", "M", "sizes"), [(20, 3, [7, 7, 6]), (20, 2, [10, 10]), (20, 5, [4] * 5), (7, 5, [2, 2, 1, 1, 1]), (3, 1, [3])]
)
def test_groups_of_users_differ_by_at_most_one(rng, K, M, sizes):
    parts = partition(labels(), tasks_of("svhn", M, 10), K, clean_per_class=5, rng=rng)
    assert len(parts.users) == K
    assert np.bincount(parts.tau).tolist() == sizes


@pytest.mark.parametrize("impurity", [0, 0.08, 0.3, 1])
def test_every_sample_of_a_task_has_exactly_one_owner(rng, impurity):
    y = rng.permutation(labels(37))
    parts = partition(y, tasks_of("cifar10", 3, 10), 20, impurity=impurity, clean_per_class=5, rng=rng)
    assert sorted(np.concatenate([*parts.users, parts.clean])) == list(range(370))


def test_the_clean_set_has_as_many_samples_of_every_class_in_a_task_or_not(rng):
    y = labels(30)
    parts = partition(y, [[0, 1], [5]], 4, clean_per_class=7, rng=rng)
    assert np.bincount(y[parts.clean]).tolist() == [7] * 10
    assert set(y[np.concatenate(parts.users)]) == {0, 1, 5}


def test_impurity_is_8_percent_of_every_task_dealt_equally_to_all_users(rng):
    y, tasks = labels(1020), tasks_of("cifar10", 2, 10)  # of 4,000 and 6,000 samples 320 and 480 are pooled: 40 a user
    counts = []
    for _ in range(20):
        parts = partition(y, tasks, 20, clean_per_class=20, rng=rng)
        foreign = np.array([(~np.isin(y[samples], tasks[task])).sum() for samples, task in zip(parts.users, parts.tau)])
        assert {len(samples) for samples in parts.users[:10]} == {368 + 40}
        assert {len(samples) for samples in parts.users[10:]} == {552 + 40}
        counts.append([foreign[:10].mean(), foreign[10:].mean()])
    assert np.allclose(np.mean(counts, axis=0), [24, 16], atol=1)  # the own task is in the pool too: 60 % and 40 % of 40


def test_without_impurity_users_have_their_task_alone(rng):
    y, tasks = labels(), tasks_of("svhn", 5, 10)
    parts = partition(y, tasks, 20, impurity=0, clean_per_class=5, rng=rng)
    for samples, task in zip(parts.users, parts.tau):
        assert set(y[samples]) == set(tasks[task])


def test_classes_are_dealt_alike_to_the_users_of_a_task(rng):
    y = labels(1000)
    parts = partition(y, tasks_of("cifar10", 2, 10), 10, impurity=0, clean_per_class=0, rng=rng)
    counts = np.array([np.bincount(y[samples], minlength=10) for samples in parts.users[:5]])[:, [0, 1, 8, 9]]
    assert np.abs(counts - 200).max() < 60  # hypergeometric with standard deviation 11


def test_the_same_seed_gives_the_same_partition():
    first, second = (partition(labels(), [[0, 1], [2]], 5, clean_per_class=3, rng=np.random.default_rng(7)) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first.users, second.users))
    assert (first.clean == second.clean).all()


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (labels(9), {"K": 1}, "users must be at least as many as tasks, but there are 1 users and 2 tasks"),
        (labels(9), {"impurity": 1.2}, "impurity must be between 0 and 1, but it is 1.2"),
        (labels(9), {"clean_per_class": 10}, "every class must have 10 samples for the clean set, but class 0 has 9"),
        (labels(9), {"clean_per_class": -1}, "clean samples per class must be at least 0"),
        (labels(9, C=1), {}, "every class must have 2 samples for the clean set, but class 1 has 0"),
        (labels(3), {"K": 9}, "every user must have samples, but user 1 of 9 has none"),
    ],
)
def test_what_cannot_be_dealt_is_named(rng, y, options, message):
    with pytest.raises(ValueError, match=message):
        partition(y, [[0], [1]], **{"K": 4, "clean_per_class": 2, "impurity": 0, "rng": rng, **options})
