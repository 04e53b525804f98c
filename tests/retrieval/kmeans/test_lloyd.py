"""Exact iterations against plain loops in float64 and faiss.Kmeans from the same centroids."""

import faiss
import numpy as np
import pytest

from retrieval.kmeans import lloyd, seeding


def blobs(seed: int, N: int = 1500, D: int = 16, C: int = 60, noise: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(C, D))[np.arange(N) % C] + noise * rng.normal(size=(N, D))).astype(
        np.float32
    )


def plain(x: np.ndarray, centroids: np.ndarray, most: int) -> tuple[np.ndarray, float, int]:
    """k-means in float64: all distances in every iteration."""
    x, centroids = x.astype(np.float64), centroids.astype(np.float64)
    last = None
    for iteration in range(most + 1):
        squared = ((x[:, None] - centroids[None]) ** 2).sum(axis=2)
        label = squared.argmin(axis=1)
        if last is not None and np.array_equal(label, last):
            break
        if iteration < most:
            last = label
            centroids = np.stack([x[label == c].mean(axis=0) for c in range(len(centroids))])
    return label, squared.min(axis=1).sum(), iteration


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("most", [1, 4, 300])
def test_iterations_are_those_of_the_plain_algorithm(noise, most):
    for seed in range(3):
        x = blobs(seed, noise=noise)
        centroids = x[np.random.default_rng(seed).permutation(len(x))[:60]]
        found = lloyd.from_centroids(x, centroids, 2)
        iterations = lloyd.iterate(found, most, lambda: None)
        label, objective, expected = plain(x, centroids, most)
        assert np.array_equal(found.label, label)
        assert found.objective == pytest.approx(objective, rel=1e-5)
        assert iterations == expected


def test_thousands_of_clusters_give_what_faiss_gives():
    x = blobs(3, N=6000, D=32, C=1200)
    centroids = x[np.random.default_rng(0).permutation(len(x))[:1200]]
    found = lloyd.from_centroids(x, centroids, 2)
    iterations = lloyd.iterate(found, 300, lambda: None)
    theirs = faiss.Kmeans(
        32, 1200, niter=iterations, max_points_per_centroid=len(x), min_points_per_centroid=1
    )
    theirs.train(x, init_centroids=centroids)
    squared, label = theirs.assign(x)
    assert np.mean(label != found.label) < 1e-3  # ties of float32
    assert found.objective == pytest.approx(squared.sum(dtype=np.float64), rel=1e-5)


def test_bounds_hold_and_distances_are_those_of_the_centroids():
    x = blobs(4, noise=2.0)
    found = lloyd.from_centroids(x, x[:60], 1)
    for _ in range(4):
        lloyd.iterate(found, 1, lambda: None)
        squared = ((x[:, None].astype(np.float64) - found.centroids[None]) ** 2).sum(axis=2)
        own = squared[np.arange(len(x)), found.label].copy()
        squared[np.arange(len(x)), found.label] = np.inf
        assert np.allclose(found.own, own, rtol=1e-4, atol=1e-3)
        assert (found.other <= squared.min(axis=1) * (1 + 1e-5) + 1e-4).all()


def test_the_number_of_threads_changes_nothing():
    x = blobs(5, N=5000, C=200)
    first, second = (lloyd.from_centroids(x, x[:200], threads) for threads in (1, 2))
    for found in (first, second):
        lloyd.iterate(found, 300, lambda: None)
    assert np.array_equal(first.label, second.label)
    assert np.array_equal(first.centroids, second.centroids)
    assert np.array_equal(first.own, second.own)


def test_an_empty_cluster_takes_the_farthest_point():
    x = np.array([[0.0], [0.1], [0.2], [5.0]], np.float32)
    found = lloyd.from_centroids(x, np.array([[0.0], [100.0]], np.float32), 1)
    lloyd.iterate(found, 300, lambda: None)
    assert found.label.tolist() == [0, 0, 0, 1]
    assert found.objective == pytest.approx(0.02, abs=1e-5)


def test_equal_points_keep_all_clusters_filled():
    x = np.ones((50, 3), np.float32)
    found = lloyd.from_centroids(x, x[:20], 1)
    assert lloyd.iterate(found, 300, lambda: None) < 5
    assert len(np.unique(found.label)) == 20


def test_float64_decides_what_float32_cannot():
    # The second point is 1 from the mean of the first two, and nearer to the third by two digits of
    # float32. The other coordinate is the same for all: it makes their products round more.
    x = np.array([[-1.5, 2], [0.5, 2], [1.5, 2]], np.float32)
    for step, label in ((-2, [0, 1, 1]), (0, [0, 0, 1]), (2, [0, 0, 1])):
        x[2, 0] = 1.5 + step * np.spacing(np.float32(1.5))
        found = lloyd.from_labels(x, np.array([0, 0, 1]), 2, 1)
        lloyd.iterate(found, 1, lambda: None)
        assert found.label.tolist() == label


def decaying(N: int = 4000, D: int = 192, C: int = 800, seed: int = 0) -> np.ndarray:
    """Unit rows in classes, with less and less variance from direction to direction."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(C, D))[np.arange(N) % C] + 0.8 * rng.normal(size=(N, D))
    x = x / np.arange(1, D + 1) @ np.linalg.qr(rng.normal(size=(D, D)))[0]
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def test_products_of_short_forms_are_upper_bounds():
    x = decaying()
    short = lloyd.short_forms(x)
    assert short is not None
    assert short.points.shape[1] < 100
    others = decaying(seed=1)[:300]
    exact = x.astype(np.float64) @ others.T.astype(np.float64)
    excess = short.points @ short.of(others).T - exact
    assert excess.min() > -1e-6
    assert np.median(excess) < 0.2


def test_points_that_vary_in_all_directions_have_no_short_form():
    assert lloyd.short_forms(np.random.default_rng(0).normal(size=(500, 64))) is None


@pytest.mark.parametrize("kind", ["random", "k-means++"])
@pytest.mark.parametrize("most", [0, 1, 300])
def test_every_point_is_with_its_nearest_centroid(kind, most):
    x = decaying()
    short = lloyd.short_forms(x)
    found = seeding.initial(x, 800, kind, 0, 2, lambda _: None, short=short)
    lloyd.iterate(found, most, lambda: None)
    squared = (
        (x.astype(np.float64) ** 2).sum(axis=1)[:, None]
        - 2 * x.astype(np.float64) @ found.centroids.T.astype(np.float64)
        + (found.centroids.astype(np.float64) ** 2).sum(axis=1)
    )
    own = squared[np.arange(len(x)), found.label].copy()
    assert (own - squared.min(axis=1)).max() < 5e-6
    assert np.allclose(found.own, own, atol=5e-6)
    squared[np.arange(len(x)), found.label] = np.inf
    assert (found.other <= squared.min(axis=1) + 5e-6).all()
