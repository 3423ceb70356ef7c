import os
from pathlib import Path

import numpy as np
import pytest

from fbnll.correction import (
    NEVER,
    auto_thresholds,
    largest_projection,
    like_classes,
    procedure2,
    projection_errors,
    server_relevance,
    thresholds_at,
    unique_match,
    user_relevance,
)
from fbnll.spectral import class_subspaces, projection_energy, relevance, top_eigenpairs

C, D = 4, 24


def classes(rng, n, spread=0.15):
    """Samples of C classes, each in a plane of its own, and their labels."""
    y = np.repeat(np.arange(C), n)
    planes = np.eye(D)[: 2 * C].reshape(C, 2, D)
    weights = np.stack([3 + rng.normal(size=C * n), rng.normal(size=C * n)], axis=1)
    return np.einsum("nk,nkd->nd", weights, planes[y]) + spread * rng.normal(size=(C * n, D)), y


@pytest.fixture
def clean():
    return classes(np.random.default_rng(1), 60)


def corrected(Z, given, clean, tau, q1=2, l=2):
    Q = class_subspaces(*clean, C, max(q1, l))
    r_server = server_relevance(*clean, class_subspaces(Z, given, C, q1))
    return procedure2(Z, given, r_server, Q, q1, l, tau)


def test_relevances_of_server_and_user_are_those_of_procedure_1(clean):
    Z, y = classes(np.random.default_rng(2), 40)
    Q, V = class_subspaces(*clean, C, 3), class_subspaces(Z, y, C, 3)
    server, user = server_relevance(*clean, V), user_relevance(Z, y, Q)
    for given in range(C):
        for c in range(C):
            assert server[given, c] == relevance(clean[0][clean[1] == c], V[given])
            assert user[given, c] == relevance(Z[y == given], Q[c])


def test_clean_labels_stay_as_they_are(clean):
    Z, y = classes(np.random.default_rng(2), 40)
    labels, phase = corrected(Z, y, clean, 0.5)
    np.testing.assert_array_equal(labels, y)
    assert (phase == 1).all()


def test_a_class_that_is_called_another_is_relabelled_as_a_whole(clean):
    Z, y = classes(np.random.default_rng(2), 40)
    Z, y = Z[y < 2], y[y < 2]
    labels, phase = corrected(Z, np.where(y == 0, 3, 1), clean, 0.5)
    np.testing.assert_array_equal(labels, y)
    assert (phase == 1).all()


def test_decisions_are_taken_on_the_labels_at_the_start_and_applied_at_once(clean):
    """Two classes that changed names change back; one after the other would have merged them."""
    Z, y = classes(np.random.default_rng(2), 40)
    swapped = np.array([1, 0, 2, 3])[y]
    labels, _ = corrected(Z, swapped, clean, 0.5)
    np.testing.assert_array_equal(labels, y)


def test_a_class_that_matches_none_or_several_is_decided_sample_by_sample(clean):
    Z, y = classes(np.random.default_rng(2), 40)
    mixed = np.where(np.arange(len(y)) % 3 == 0, 3, y)
    for tau in (0.0, NEVER):  # all classes reach 0, none more than 1
        labels, phase = corrected(Z, mixed, clean, tau)
        assert (phase == 2).all()
        energy = projection_energy(Z, class_subspaces(*clean, C, 2))
        np.testing.assert_array_equal(labels, energy.argmax(axis=1))
        assert (labels == y).mean() > 0.9 > (mixed == y).mean()


def test_a_threshold_is_reached_by_equality():
    r_avg = np.array([[0.8, 0.3]])
    assert unique_match(r_avg, np.array([0.8])).tolist() == [0]
    assert unique_match(r_avg, np.array([np.nextafter(0.8, 1)])).tolist() == [-1]


def test_a_tie_of_projections_keeps_the_given_label():
    Q = np.eye(4)[:2].reshape(2, 4, 1)
    Z = np.array([[1.0, 1.0, 0, 0], [1.0, 1.0 + 1e-3, 0, 0], [0.0, 0, 1, 0]])
    energy = projection_energy(Z, Q)
    for given in (0, 1):
        assert largest_projection(energy, np.full(3, given)).tolist() == [given, 1, given]


def test_each_phase_has_its_own_rank(clean):
    """Phase 1 looks at q1 columns alone: noise in the others does not change it. Phase 2 looks at l."""
    Z, y = classes(np.random.default_rng(2), 40)
    Q = class_subspaces(*clean, C, 4)
    r = server_relevance(*clean, class_subspaces(Z, y, C, 2))
    spoilt = Q.copy()
    spoilt[:, :, 2:] = np.roll(Q, 1, axis=0)[:, :, :2]
    assert (procedure2(Z, y, r, Q, 2, 2, 0.5)[1] == procedure2(Z, y, r, spoilt, 2, 4, 0.5)[1]).all()
    assert (procedure2(Z, y, r, Q, 2, 2, NEVER)[0] == y).all()
    assert (procedure2(Z, y, r, spoilt, 2, 4, NEVER)[0] != y).any()
    with pytest.raises(ValueError, match="Q must have a column for each of q1 = 2 and l = 5, but it has 4"):
        procedure2(Z, y, r, Q, 2, 5, 0.5)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_users_with_hardly_any_samples_are_handled(clean, n):
    Z, y = classes(np.random.default_rng(2), 1)
    labels, phase = corrected(Z[:n], y[:n], clean, 0.5)
    assert labels.shape == phase.shape == (n,)


def test_order_sign_and_common_rotation_change_no_decision(clean):
    rng = np.random.default_rng(3)
    Z, y = classes(rng, 40)
    given = np.where(rng.random(len(y)) < 0.3, rng.integers(0, C, len(y)), y)
    expected = corrected(Z, given, clean, 0.6)
    order = rng.permutation(len(y))
    for part, whole in zip(corrected(Z[order], given[order], clean, 0.6), expected):
        np.testing.assert_array_equal(part, whole[order])
    U = np.linalg.qr(rng.normal(size=(D, D)))[0]
    for change in (U, -np.eye(D)):
        for part, whole in zip(corrected(Z @ change, given, (clean[0] @ change, clean[1]), 0.6), expected):
            np.testing.assert_array_equal(part, whole)


def test_a_table_of_thresholds_is_read_by_the_logarithm_of_the_size():
    table = np.array([1.0, 100.0]), np.array([0.4, 0.8])
    np.testing.assert_allclose(thresholds_at(np.array([0, 1, 10, 100, 5000]), table), [0.4, 0.4, 0.6, 0.8, 0.8])
    np.testing.assert_allclose(thresholds_at(np.array([3, 7]), 0.7), [0.7, 0.7])


# ---------------------------------------------------------------- the automatic threshold


def test_the_automatic_threshold_is_a_function_of_the_clean_set_and_its_generator(clean):
    first, second = (auto_thresholds(*clean, C, 2, 2, np.random.default_rng(5)) for _ in range(2))
    for a, b in zip(first, second):
        assert a.tobytes() == b.tobytes()
    sizes, tau = first
    assert sizes[0] == 1
    assert sizes[-1] == 120
    assert (np.diff(sizes) > 0).all()
    assert ((tau > 0) & (tau <= NEVER)).all()


def test_the_automatic_threshold_is_near_the_best_in_hindsight_where_phase_2_errs_often():
    """Users of other samples, with two classes swapped, one class mixed into others, or labels at random."""
    clean = classes(np.random.default_rng(1), 60, spread=1.3)
    automatic = auto_thresholds(*clean, C, 3, 2, np.random.default_rng(5))
    rng = np.random.default_rng(6)

    def user(n, kind):
        Z, y = classes(rng, n, spread=1.3)
        to = [
            np.array([2, 1, 0, 3])[y],
            np.where(rng.random(len(y)) < 0.4, 3, y),
            np.where(rng.random(len(y)) < 0.5, rng.integers(0, C), y),
        ]
        return Z, y, to[kind]

    users = [user(n, kind) for n in (15, 40, 100) for kind in range(3)]

    def noise_left(tau):
        return np.mean([np.mean(corrected(Z, given, clean, tau, q1=3)[0] != y) for Z, y, given in users])

    best = min(noise_left(float(tau)) for tau in np.arange(0.3, 1, 0.05))
    assert noise_left(automatic) < 0.75 * noise_left(NEVER)
    assert noise_left(automatic) < 1.5 * best


def test_where_the_projection_never_errs_it_decides_everything(clean):
    assert (projection_errors(*clean, C, 2, np.random.default_rng(0)) == 0).all()
    _, tau = auto_thresholds(*clean, C, 2, 2, np.random.default_rng(5))
    assert (tau == NEVER).all()


def test_a_smaller_class_needs_less_where_relevance_grows_with_the_number_of_samples(clean):
    """In 24 directions of which all vary, ten samples look less like their class than a hundred do."""
    noisy = classes(np.random.default_rng(1), 60, spread=1.0)
    sizes, tau = auto_thresholds(*noisy, C, 6, 2, np.random.default_rng(5))
    reachable = tau < NEVER
    assert reachable[sizes >= 10].all()
    assert tau[sizes >= 60].min() > tau[(sizes > 6) & (sizes < 20)].max()


def test_one_class_alone_always_matches_and_too_small_a_clean_set_is_named():
    rng = np.random.default_rng(0)
    assert thresholds_at(np.array([5]), auto_thresholds(rng.normal(size=(9, 3)), np.zeros(9, int), 1, 2, 2, rng)) == [0]
    y = np.array([0, 0, 1])
    with pytest.raises(ValueError, match="at least 2 clean samples of every class, but class 1 has 1"):
        auto_thresholds(rng.normal(size=(3, 3)), y, 2, 2, 2, rng)
    _, tau = auto_thresholds(rng.normal(size=(4, 3)), np.array([0, 0, 1, 1]), 2, 2, 2, rng)
    assert np.isfinite(tau).all()


def test_simulated_samples_have_mean_and_covariance_of_their_class_and_of_all(clean):
    Z, y = clean
    prior = 20
    drawn = like_classes(Z, y, C, np.full(C, 20_000), prior, np.random.default_rng(0))
    around = np.concatenate([Z[y == c] - Z[y == c].mean(axis=0) for c in range(C)])
    pooled = around.T @ around / (len(Z) - C)
    for c in range(C):
        share = prior / (prior + (y == c).sum())
        np.testing.assert_allclose(drawn[c].mean(axis=0), Z[y == c].mean(axis=0), atol=0.05)
        np.testing.assert_allclose(np.cov(drawn[c].T), (1 - share) * np.cov(Z[y == c].T) + share * pooled, atol=0.05)


def test_errors_of_the_projection_are_those_on_samples_it_has_not_seen():
    rng = np.random.default_rng(0)
    Z, y = classes(rng, 50, spread=0.9)
    found = projection_errors(Z, y, C, 6, np.random.default_rng(0))
    Q = class_subspaces(Z, y, C, 6)
    seen = [np.mean(projection_energy(Z[y == c], Q).argmax(axis=1) != c) for c in range(C)]
    X, t = classes(rng, 2000, spread=0.9)
    unseen = [np.mean(projection_energy(X[t == c], Q).argmax(axis=1) != c) for c in range(C)]
    assert np.mean(seen) < np.mean(unseen) - 0.02
    assert abs(np.mean(found) - np.mean(unseen)) < 0.06


@pytest.mark.skipif("FBNLL_DATA" not in os.environ, reason="needs the environment variable FBNLL_DATA, a folder with fashion_mnist")
def test_on_real_images_the_automatic_threshold_leaves_less_noise_than_phase_2_alone():
    """Fashion-MNIST, every other pixel, 50 clean samples a class: pure classes of 10 to 300, one half mixed with another, two renamed."""
    from fbnll.data import load

    data = load("fashion_mnist", Path(os.environ["FBNLL_DATA"]), quiet=True)
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(data.y_train == c))[:350] for c in range(10)]
    take = np.concatenate([r[:50] for r in rows])
    Z = data.X_train[:, ::2, ::2].reshape(-1, 196) / np.float32(255)
    Z_s, y_s = Z[take], data.y_train[take]
    table = auto_thresholds(Z_s, y_s, 10, 10, 20, np.random.default_rng(1))
    used = np.concatenate([r[50 : 50 + n] for r, n in zip(rows, (300, 300, 300, 150, 150, 40, 40, 20, 20, 10))])
    true = data.y_train[used]
    given = np.array([0, 1, 2, 3, 9, 5, 6, 7, 8, 4])[true]
    given = np.where((true == 0) & (rng.random(len(true)) < 0.5), 1, given)
    Q, V = class_subspaces(Z_s, y_s, 10, 20), class_subspaces(Z[used], given, 10, 10)
    noise = {}
    for name, tau in (("auto", table), ("phase 2", NEVER)):
        labels, _ = procedure2(Z[used], given, server_relevance(Z_s, y_s, V), Q, 10, 20, tau)
        noise[name] = np.mean(labels != true)
    assert noise["auto"] < 0.8 * noise["phase 2"]


def test_top_eigenpairs_of_a_class_are_what_a_user_uploads(clean):
    Z, y = clean
    np.testing.assert_allclose(np.abs(class_subspaces(Z, y, C, 3)[2]), np.abs(top_eigenpairs(Z[y == 2], 3)[1]))
