import numpy as np
import pytest

from fbnll.clustering import LINKAGES, adjusted_rand_index, hac, matched_share, membership, merge_tree, suggest_M

PAPER_R = np.array(  # tab:rel_matrix
    [
        [1.00, 0.97, 0.31, 0.31, 0.32],
        [0.97, 1.00, 0.31, 0.32, 0.32],
        [0.31, 0.31, 1.00, 0.97, 0.98],
        [0.31, 0.32, 0.97, 1.00, 0.98],
        [0.32, 0.32, 0.98, 0.98, 1.00],
    ]
)
EVERY_LINKAGE = pytest.mark.parametrize("linkage", LINKAGES)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def random_R(rng, K):
    R = rng.random((K, K))
    return np.maximum((R + R.T) / 2, np.eye(K))


def blocks(sizes, within=0.9, between=0.4):
    tau = np.repeat(np.arange(len(sizes)), sizes)
    R = np.where(tau[:, None] == tau, within, between)
    np.fill_diagonal(R, 1)
    return R, tau


@EVERY_LINKAGE
def test_the_paper_s_example_has_its_two_clusters(linkage):
    assert hac(PAPER_R, 2, linkage).tolist() == [0, 0, 1, 1, 1]


def test_the_paper_s_example_merges_the_most_similar_first():
    tree, present = merge_tree(PAPER_R)
    assert present.tolist() == [0, 1, 2, 3, 4]
    assert np.allclose(tree[:, 2], [0.02, 0.025, 0.03, 0.685])  # two of the three, the third to them, the first two, both groups


@EVERY_LINKAGE
def test_there_are_exactly_M_clusters_none_empty_numbered_by_their_first_user(rng, linkage):
    tied = np.round(random_R(rng, 9), 1)
    for R in (random_R(rng, 9), tied, np.ones((9, 9)), np.eye(9)):
        for M in range(1, 10):
            m = hac(R, M, linkage)
            assert m.dtype == np.int64
            assert list(dict.fromkeys(m.tolist())) == list(range(M))


def test_clusters_follow_users_when_these_are_reordered(rng):
    R, order = random_R(rng, 12), rng.permutation(12)
    assert adjusted_rand_index(hac(R[np.ix_(order, order)], 4), hac(R, 4)[order]) == 1


@pytest.mark.parametrize("nothing", [0.0, np.nan, -1.0])
def test_a_user_that_cannot_be_compared_is_in_no_cluster(nothing):
    R = np.insert(np.insert(PAPER_R, 2, nothing, axis=0), 2, nothing, axis=1)
    assert hac(R, 2).tolist() == [0, 0, -1, 1, 1, 1]


def test_a_user_that_shared_eigenvectors_but_no_relevances_is_in_no_cluster():
    R = PAPER_R.copy()
    R[1] = R[:, 1] = np.nan
    assert hac(R, 2).tolist() == [0, -1, 1, 1, 1]


def test_one_user_is_one_cluster():
    assert hac(np.array([[0.99]]), 1).tolist() == [0]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="M must be from 1 to the number of users that can be compared, but M is 3 and there are 2"):
        hac(np.diag([1.0, 0.0, 1.0]), 3)
    with pytest.raises(ValueError, match="but M is 1 and there are 0"):
        hac(np.zeros((2, 2)), 1)
    with pytest.raises(ValueError, match="but M is 0"):
        hac(PAPER_R, 0)
    with pytest.raises(ValueError, match=r"linkage must be .* 'ward', which needs distances in a Euclidean space"):
        hac(PAPER_R, 2, "ward")
    with pytest.raises(ValueError, match="linkage must be average, single or complete, but it is 'median'"):
        hac(PAPER_R, 2, "median")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.5])
def test_an_R_that_is_not_symmetric_and_finite_is_refused(bad):
    R = PAPER_R.copy()
    R[0, 1] = bad
    with pytest.raises(ValueError, match="R must be symmetric and finite"):
        hac(R, 2)


@pytest.mark.parametrize("sizes", [(20,), (10, 10), (7, 7, 6), (4, 4, 4, 4, 4), (2, 2, 2, 14), (1,), (1, 1)])
def test_the_number_of_clusters_is_found(rng, sizes):
    R, _ = blocks(sizes)
    jitter = rng.uniform(-0.01, 0.01, R.shape)
    assert suggest_M(R + jitter + jitter.T) == (len(sizes) if max(sizes) > 1 else 1)


def test_the_number_of_clusters_is_found_among_absent_users():
    R = np.insert(np.insert(PAPER_R, 2, np.nan, axis=0), 2, np.nan, axis=1)
    assert suggest_M(R) == 2
    assert suggest_M(np.ones((6, 6))) == 1
    assert suggest_M(np.zeros((6, 6))) == 1


def test_every_user_is_in_one_cluster_of_the_membership_matrix():
    CI = membership(np.array([2, 0, -1, 0]), 3)
    assert CI.tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("a", "b", "ari", "share"),
    [
        ([0, 0, 1, 1], [1, 1, 0, 0], 1, 1),
        ([0, 0, 1, 2], [0, 0, 1, 1], 4 / 7, 3 / 4),  # 1 of 2 pairs together in both: (1 - 1·2/6) / (3/2 - 1·2/6)
        ([0, 0, 1, 1], [0, 1, 0, 1], -1 / 2, 1 / 2),
        ([0, 0, 0, 0], [0, 1, 2, 3], 0, 1 / 4),
        ([0, 0, 0], [4, 4, 4], 1, 1),
        ([0, 1, 2], [2, 0, 1], 1, 1),
        ([0], [3], 1, 1),
    ],
)
def test_agreement_by_hand(a, b, ari, share):
    a, b = np.array(a), np.array(b)
    for first, second in ((a, b), (b, a)):
        assert adjusted_rand_index(first, second) == pytest.approx(ari)
        assert matched_share(first, second) == pytest.approx(share)


def test_agreement_leaves_absent_users_out(rng):
    a, b = rng.integers(0, 3, (2, 30))
    absent = rng.random(30) < 0.3
    for agreement in (adjusted_rand_index, matched_share):
        assert agreement(np.where(absent, -1, a), b) == agreement(a[~absent], b[~absent])
        assert np.isnan(agreement(np.full(3, -1), np.zeros(3, int)))


def test_random_groupings_agree_by_0_on_average(rng):
    assert np.mean([adjusted_rand_index(*rng.integers(0, 3, (2, 40))) for _ in range(500)]) == pytest.approx(0, abs=0.01)
