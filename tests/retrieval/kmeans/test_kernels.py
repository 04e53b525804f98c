"""Compiled loops of k-means against plain NumPy."""

import numpy as np
import pytest
from sklearn.metrics.cluster import contingency_matrix, expected_mutual_information

from retrieval.kmeans import kernels


@pytest.mark.parametrize("exact", [True, False], ids=["products", "upper bounds"])
def test_the_two_nearest_centroids_other_than_the_own_are_found(rng, exact):
    points, centroids = rng.standard_normal((40, 5)), rng.standard_normal((70, 5))
    points, centroids = points.astype(np.float32), centroids.astype(np.float32)
    rows, columns = np.arange(40), np.arange(70)
    norms = (centroids**2).sum(axis=1)
    near = norms - 2 * points @ centroids.T
    label = near.argmin(axis=1).astype(np.int32)
    label[::2] = 0
    near[rows, label] = np.inf
    bounds = points @ centroids.T
    limits = np.full(40, -np.inf, np.float32)  # the bounds are the products
    if not exact:
        bounds += rng.random(bounds.shape).astype(np.float32)
        limits = np.full(40, np.inf, np.float32)
    nearest = np.full((2, 40), np.inf, np.float32)
    which = np.full(40, -1, np.int32)
    own = np.zeros(40, np.float32)
    state = kernels.State(points, own, centroids, label, own, own)
    vectors, found = kernels.Vectors(centroids, norms), kernels.Nearest(nearest, which)
    kernels.fold(bounds, vectors, columns, rows, limits, state, found)
    assert which.tolist() == near.argmin(axis=1).tolist()
    first, second = np.sort(near, axis=1)[:, :2].T
    np.testing.assert_allclose(nearest[0], first, atol=1e-5)
    if exact:
        np.testing.assert_allclose(nearest[1], second, atol=1e-5)
    else:  # a bound may stand for the second one
        assert (nearest[1] <= second + 1e-5).all()


def test_sums_and_counts_are_those_of_the_new_clusters(rng):
    points = rng.standard_normal((30, 4)).astype(np.float32)
    before = rng.integers(-1, 5, 30).astype(np.int32)
    after = rng.integers(0, 5, 30).astype(np.int32)
    sums = np.stack([points[before == c].sum(axis=0, dtype=np.float64) for c in range(5)])
    counts, touched = np.bincount(before[before >= 0], minlength=5), np.zeros(5, np.bool_)
    changed = np.flatnonzero(before != after)
    kernels.transfer(points, changed, before, after, sums, counts, touched)
    np.testing.assert_allclose(sums, [points[after == c].sum(axis=0) for c in range(5)], atol=1e-5)
    assert counts.tolist() == np.bincount(after, minlength=5).tolist()
    assert touched.all()


def test_the_gain_of_a_centroid_is_what_distances_fall_by(rng):
    distances, own = rng.random((2, 10_000), np.float32)
    assert kernels.gain(distances, own) == pytest.approx(
        np.maximum(0, own - distances).sum(), rel=1e-5
    )


def test_information_by_chance_is_that_of_scikit_learn(rng):
    labels, other = rng.integers(0, 9, 200), rng.integers(0, 30, 200)
    sizes = [np.unique(np.bincount(x)[np.unique(x)], return_counts=True) for x in (labels, other)]
    log_factorials = np.cumsum(np.log(np.maximum(np.arange(201), 1)))
    found = kernels.information_by_chance(*sizes[0], *sizes[1], log_factorials)
    table = contingency_matrix(labels, other, sparse=True)
    assert found == pytest.approx(expected_mutual_information(table, 200), rel=1e-9)
