"""Initial centroids against plain greedy k-means++ of scikit-learn."""

import numpy as np
import pytest
from sklearn.cluster import kmeans_plusplus

from benchmarks.measure import clustered
from retrieval.kmeans import STARTS, lloyd, seeding


def objective(x: np.ndarray, centroids: np.ndarray) -> float:
    return lloyd.from_centroids(x, centroids, 1).objective


@pytest.mark.parametrize(("N", "D", "k"), [(1200, 16, 40), (3300, 16, 1100)])
def test_greedy_centroids_are_as_good_as_those_of_scikit_learn(N, D, k):
    x, _ = clustered(N, D, k, 0.3)
    ours, theirs, random = [], [], []
    for seed in range(3):
        found = seeding.initial(x, k, "k-means++", seed, 2, lambda _: None)
        lloyd.iterate(found, 300, lambda: None)
        ours.append(found.objective)
        for kept, centroids in (
            (theirs, kmeans_plusplus(x, k, random_state=seed)[0]),
            (random, x[np.random.default_rng(seed).permutation(N)[:k]]),
        ):
            other = lloyd.from_centroids(x, centroids, 2)
            lloyd.iterate(other, 300, lambda: None)
            kept.append(other.objective)
    assert np.mean(ours) < 1.03 * np.mean(theirs)
    assert np.mean(ours) < 0.9 * np.mean(random)


@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("k", [1, 7, 300])
def test_the_state_is_that_of_the_centroids(kind, k):
    x, _ = clustered(900, 12, 30, 1.0)
    told = []
    found = seeding.initial(x, k, kind, 3, 2, told.append)
    again = lloyd.from_centroids(x, found.centroids, 1)
    assert np.array_equal(found.label, again.label)
    assert np.allclose(found.own, again.own, atol=1e-4)
    assert np.allclose(found.other, again.other, atol=1e-4)
    assert sum(told) == k
    assert (x[:, None] == found.centroids[None]).all(axis=2).any(axis=0).all()  # rows of x
    assert len(np.unique(found.centroids, axis=0)) == k


def test_threads_change_nothing_and_the_seed_everything():
    x, _ = clustered(3000, 12, 200, 1.0)
    one, two, other = (
        seeding.initial(x, 200, "k-means++", seed, threads, lambda _: None).centroids
        for seed, threads in ((0, 1), (0, 2), (1, 1))
    )
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_equal_points_can_all_be_centroids():
    x = np.ones((30, 2), np.float32)
    assert objective(x, seeding.initial(x, 30, "k-means++", 0, 1, lambda _: None).centroids) == 0
