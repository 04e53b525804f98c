"""k-means from the distances of all pairs gives what k-means with centroids gives."""

import numpy as np
import pytest

from benchmarks.measure import clustered
from retrieval.kmeans import lloyd, pairs, seeding


def start(x: np.ndarray, k: int, seed: int = 0) -> pairs.PairClusters:
    trials = int(seeding.trials(0, k))
    return pairs.initial(pairs.all_pairs(x, 2), k, trials, seed, lambda _: None)


def test_distances_of_all_pairs_over_several_tiles():
    x, _ = clustered(1100, 5, 30, 1.0)
    exact = ((x[:, None].astype(np.float64) - x) ** 2).sum(axis=2)
    known = pairs.all_pairs(x, 2)
    assert np.allclose(known.squared, exact, atol=1e-4)
    assert not known.squared.diagonal().any()


def test_the_start_is_the_one_without_pairs():
    x, _ = clustered(1500, 32, 50, 1.0)
    told = []
    expected = seeding.initial(x, 50, "k-means++", 3, 1, told.append)
    found = start(x, 50, seed=3)
    assert np.array_equal(found.label, expected.label)
    assert np.allclose(found.own, expected.own, atol=1e-4)


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("most", [1, 4, 300])
def test_iterations_are_those_with_centroids(noise, most):
    x, _ = clustered(1500, 24, 60, noise)  # more than one tile, more than one block of sums
    for seed in range(3):
        expected = seeding.initial(x, 60, "k-means++", seed, 1, lambda _: None)
        found = start(x, 60, seed)
        iterations = pairs.iterate(found, most, lambda: None)
        assert iterations == lloyd.iterate(expected, most, lambda: None)
        assert np.array_equal(found.label, expected.label)
        assert np.allclose(found.own, expected.own, rtol=1e-4, atol=1e-4)
        assert found.objective == pytest.approx(expected.objective, rel=1e-5)


def test_iterations_can_be_taken_up_again():
    x, _ = clustered(1500, 24, 60, 1.5)
    whole, parts = start(x, 60), start(x, 60)
    used = pairs.iterate(whole, 300, lambda: None)
    assert used > 4
    assert pairs.iterate(parts, 4, lambda: None) == 4
    assert pairs.iterate(parts, 296, lambda: None) == used - 4
    assert np.array_equal(whole.label, parts.label)


def test_an_empty_cluster_takes_the_farthest_point():
    x = np.array([[0.0], [0.1], [0.2], [5.0]], np.float32)
    found = start(x, 2)
    found.label[:] = 0
    pairs.iterate(found, 300, lambda: None)
    assert len(set(found.label[:3].tolist())) == 1
    assert found.label[3] != found.label[0]
    assert found.objective == pytest.approx(0.02, abs=1e-5)


def test_equal_points_keep_all_clusters_filled():
    found = start(np.ones((50, 3), np.float32), 20)
    assert pairs.iterate(found, 300, lambda: None) < 5
    assert len(np.unique(found.label)) == 20


def test_iterations_from_labels_confirm_what_pairs_found():
    x, _ = clustered(1500, 24, 60, 1.5)
    found = start(x, 60)
    pairs.iterate(found, 300, lambda: None)
    again = lloyd.from_labels(x, found.label, 60, 2)
    assert lloyd.iterate(again, 300, lambda: None) == 1
    assert np.array_equal(again.label, found.label)
    assert again.objective == pytest.approx(found.objective, rel=1e-5)
