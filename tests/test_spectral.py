import numpy as np
import pytest

from fbnll.spectral import (
    alignment,
    class_subspaces,
    covariance,
    projection_energy,
    relevance,
    responses,
    similarity_matrix,
    top_eigenpairs,
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def features(rng, n, d):
    """Features with a decaying spectrum, so that their top eigenvectors are well determined."""
    return rng.standard_normal((n, d)) * np.logspace(0, -2, d)


def with_spectrum(lam):
    """Features whose covariance is diagonal: Σ = diag(lam)."""
    return np.diag(np.sqrt(len(lam) * np.asarray(lam, float)))


SHAPES = pytest.mark.parametrize("n", [3, 7, 40, 200])  # fewer and more samples than the 40 columns


@SHAPES
def test_eigenpairs_are_those_of_the_covariance(rng, n):
    Z = features(rng, n, 40)
    lam, V = top_eigenpairs(Z, 3)
    expected = np.linalg.eigvalsh(covariance(Z))[::-1][:3]
    assert np.allclose(lam, expected, rtol=1e-10)
    assert np.allclose(covariance(Z) @ V, lam * V, atol=1e-12)
    assert np.allclose(V.T @ V, np.eye(3), atol=1e-10)


@SHAPES
def test_the_response_along_an_own_eigenvector_is_its_eigenvalue(rng, n):
    Z = features(rng, n, 40)
    lam, V = top_eigenpairs(Z, 3)
    assert np.allclose(responses(Z, V), lam, rtol=1e-10)


@SHAPES
def test_the_response_is_the_length_of_the_covariance_times_the_direction(rng, n):
    Z, W = features(rng, n, 40), rng.standard_normal((5, 2, 40, 3))
    assert np.allclose(responses(Z, W), np.linalg.norm(covariance(Z) @ W, axis=-2), rtol=1e-10)


@SHAPES
def test_a_user_is_fully_relevant_to_itself(rng, n):
    Z = features(rng, n, 40)
    assert relevance(Z, top_eigenpairs(Z, 9)[1].astype(np.float32)) == pytest.approx(1, abs=1e-6)


def test_relevance_is_between_0_and_1(rng):
    for n, d, q in [(5, 30, 4), (50, 30, 30), (1, 4, 2), (300, 8, 3)]:
        Z, W = features(rng, n, d), rng.standard_normal((20, d, q))
        r = relevance(Z, W / np.linalg.norm(W, axis=-2, keepdims=True))
        assert r.shape == (20,)
        assert ((r >= 0) & (r <= 1)).all()


def test_relevance_by_hand():
    Z = with_spectrum([8, 2, 1])
    swapped = np.eye(3)[:, [1, 0]]
    assert relevance(Z, swapped) == pytest.approx(1 / 4)  # s = 2/8, 2/8
    assert relevance(Z, np.eye(3)[:, [0, 2]]) == pytest.approx(np.sqrt(1 / 2))  # s = 8/8, 1/2


def test_users_with_nothing_in_common_have_relevance_0():
    assert relevance(np.array([[1.0, 0.0]]), np.array([[0.0], [1.0]])) == 0


def test_one_direction_without_response_makes_the_relevance_0():
    Z = with_spectrum([4, 1, 0])
    assert relevance(Z, np.eye(3)[:, [0, 2]]) == 0


def test_a_product_of_hundreds_of_small_ratios_does_not_underflow():
    Z = with_spectrum(np.repeat([1, 1e-3], 300))
    assert relevance(Z, np.eye(600)[:, 300:]) == pytest.approx(1e-3)


def test_others_in_a_stack_are_compared_as_one_by_one(rng):
    Z, W = features(rng, 50, 12), rng.standard_normal((2, 3, 12, 4))
    one_by_one = [[relevance(Z, w) for w in row] for row in W]
    assert np.allclose(relevance(Z, W), one_by_one, rtol=1e-12)


def test_relevance_does_not_depend_on_order_sign_scale_or_a_common_rotation(rng):
    Z, other = features(rng, 60, 10), features(rng, 80, 10) + 0.3
    W = top_eigenpairs(other, 4)[1]
    r = relevance(Z, W)
    rotation = np.linalg.qr(rng.standard_normal((10, 10)))[0]
    assert 0.01 < r < 0.99
    assert relevance(rng.permutation(Z), W) == pytest.approx(r, rel=1e-10)
    assert relevance(Z, W * [1, -1, -1, 1]) == pytest.approx(r, rel=1e-12)
    assert relevance(Z @ rotation, rotation.T @ W) == pytest.approx(r, rel=1e-8)
    for scale in (1e-140, 1e-30, 1e30, 1e140):
        assert relevance(Z * scale, W) == pytest.approx(r, rel=1e-8)
        assert relevance(Z, top_eigenpairs(other * scale, 4)[1]) == pytest.approx(r, rel=1e-8)


def test_single_precision_features_are_computed_in_double_precision(rng):
    Z = features(rng, 50, 12).astype(np.float32)
    for single, double in zip(top_eigenpairs(Z, 5), top_eigenpairs(Z.astype(np.float64), 5)):
        assert single.dtype == np.float64
        assert (single == double).all()


@pytest.mark.parametrize("n", [8, 100])
def test_eigenpairs_beyond_the_rank_are_zero(rng, n):
    Z = rng.standard_normal((n, 3)) @ rng.standard_normal((3, 20))
    lam, V = top_eigenpairs(Z, 9)
    assert (lam[:3] > 0).all()
    assert not lam[3:].any()
    assert not V[:, 3:].any()
    assert relevance(Z, V) == pytest.approx(1)


def test_rounding_to_single_precision_adds_no_rank(rng):
    Z = (rng.standard_normal((500, 3)) @ rng.standard_normal((3, 20))).astype(np.float32)
    assert (top_eigenpairs(Z, 9)[0] > 0).sum() == 3


def test_the_adaptive_rank_keeps_eigenvalues_above_a_share_of_the_largest():
    Z = with_spectrum([10, 5, 1.01, 0.99, 0])
    assert np.allclose(top_eigenpairs(Z, 5, eps=0.1)[0], [10, 5, 1.01, 0, 0])
    assert np.allclose(top_eigenpairs(Z, 2, eps=0.1)[0], [10, 5])
    assert np.allclose(top_eigenpairs(Z * 1e6, 5, eps=0.1)[0], np.array([10, 5, 1.01, 0, 0]) * 1e12)


def test_a_pair_is_compared_on_the_smaller_of_two_ranks():
    Z = with_spectrum([8, 4, 1])
    W = np.eye(3)[:, [0, 2, 1]]
    W[:, 2] = 0
    assert relevance(Z, W) == pytest.approx(np.sqrt(1 / 4))  # the other has two: s = 1, 1/4
    assert relevance(Z, W, eps=0.6) == pytest.approx(1)  # the owner has one: s = 1


@pytest.mark.parametrize("n", [0, 1, 30])
def test_nothing_to_compare_gives_relevance_0(rng, n):
    assert relevance(np.zeros((n, 5)), np.eye(5)[:, :2]) == 0
    assert relevance(features(rng, 30, 5), np.zeros((5, 2))) == 0


def test_no_samples_give_zeros():
    lam, V = top_eigenpairs(np.zeros((0, 4)), 2)
    assert not lam.any()
    assert not V.any()
    assert not covariance(np.zeros((0, 4))).any()
    assert not responses(np.zeros((0, 4)), np.eye(4)).any()


def test_one_sample_and_constant_features_have_rank_1(rng):
    sample = rng.standard_normal((1, 6))
    for Z in (sample, np.repeat(sample, 50, axis=0)):
        lam, V = top_eigenpairs(Z, 3)
        assert np.allclose(lam, [(sample**2).sum(), 0, 0])
        assert np.allclose(np.abs(V[:, 0]), np.abs(sample[0]) / np.linalg.norm(sample))


def test_equal_eigenvalues_are_fully_relevant_in_any_direction(rng):
    rotation = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    assert relevance(with_spectrum([2] * 6), rotation) == pytest.approx(1)


def test_alignment_is_1_where_both_are_0():
    assert (alignment(np.array([0.0, 0.0, 2.0]), np.array([[0.0, 1.0, 1.0]])) == [[1, 0, 0.5]]).all()


def test_the_similarity_matrix_is_the_mean_of_both_relevances(rng):
    users = [features(rng, n, 12) + shift for n, shift in [(40, 0), (60, 0.5), (5, 0)]]
    R = similarity_matrix(users, q=4)
    V = [top_eigenpairs(Z, 4)[1] for Z in users]
    by_hand = [[(relevance(users[k], V[j]) + relevance(users[j], V[k])) / 2 for j in range(3)] for k in range(3)]
    assert np.allclose(R, by_hand, atol=1e-6)  # eigenvectors travel in single precision
    assert (R == R.T).all()


def test_a_user_without_samples_has_similarity_0_to_itself(rng):
    R = similarity_matrix([features(rng, 30, 5), np.zeros((0, 5))], q=2)
    assert R[1, 1] == 0
    assert R[0, 0] == pytest.approx(1)


def test_a_class_subspace_comes_from_the_samples_of_that_class_alone(rng):
    Z, y = features(rng, 60, 8), np.repeat([2, 0], 30)
    Q = class_subspaces(Z, y, C=4, l=3)
    assert (Q[0] == top_eigenpairs(Z[30:], 3)[1]).all()
    assert (Q[2] == top_eigenpairs(Z[:30], 3)[1]).all()
    assert not Q[[1, 3]].any()


def test_projection_energy_is_the_length_of_the_projection(rng):
    Z, Q = features(rng, 9, 6), class_subspaces(features(rng, 40, 6), np.arange(40) % 2, C=2, l=3)
    expected = [[np.linalg.norm(Q_c @ Q_c.T @ z) for Q_c in Q] for z in Z]
    assert np.allclose(projection_energy(Z, Q), expected, rtol=1e-10)


def test_wrong_arguments_are_named():
    Z = np.ones((5, 32))
    with pytest.raises(ValueError, match="q must be at most the feature dimension, but q is 40 and features have 32 columns"):
        top_eigenpairs(Z, 40)
    with pytest.raises(ValueError, match="q must be at least 1, but q is 0"):
        top_eigenpairs(Z, 0)
    with pytest.raises(ValueError, match=r"eps must be at least 0 and below 1, but it is 1\.5"):
        top_eigenpairs(Z, 3, eps=1.5)
    with pytest.raises(ValueError, match="l must be from 1 to the feature dimension, but l is 33"):
        class_subspaces(Z, np.zeros(5, int), C=2, l=33)
    with pytest.raises(ValueError, match="labels must be between 0 and 1, but some are not"):
        class_subspaces(Z, np.arange(5), C=2, l=3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
@pytest.mark.parametrize("n", [4, 40])
def test_features_that_are_not_finite_are_refused(bad, n):
    Z = np.ones((n, 8))
    Z[1, 2] = bad
    for compute in (covariance, lambda Z: top_eigenpairs(Z, 2), lambda Z: relevance(Z, np.eye(8))):
        with pytest.raises(ValueError, match=f"features must be finite, and small enough to be squared, but 1 of {8 * n} values are not"):
            compute(Z)
