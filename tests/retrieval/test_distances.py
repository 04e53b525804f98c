"""Distances of points in a space are those of the vectors."""

import numpy as np
import pytest

from retrieval.distances import row_scores, single_precision, space_of, unit_length


def scores(queries, gallery, distance):
    """(Q, G) cosines, 0 for rows of zeros, or Euclidean distances."""
    if distance == "l2":
        return np.linalg.norm(queries[:, None] - gallery, axis=2)
    lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(gallery, axis=1)
    return np.divide(queries @ gallery.T, lengths, out=np.zeros(lengths.shape), where=lengths > 0)


@pytest.mark.parametrize("size", [1e-150, 1, 1e150])
@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_scores_of_points_are_cosines_and_distances_of_the_vectors(rng, distance, size):
    queries, gallery = size * rng.standard_normal((5, 4)), size * (rng.standard_normal((9, 4)) + 3)
    queries[2] = gallery[4] = 0
    space = space_of(queries, gallery, distance)
    q = space.points(queries, slice(None), query=True)
    g = space.points(gallery, np.arange(9))
    found = space.score(((q[:, None] - g) ** 2).sum(axis=2)) / (size if distance == "l2" else 1)
    wanted = scores(queries / size, gallery / size, distance)
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert np.abs(g[:, :4].mean(axis=0)).max() < 1e-12  # about the mean of the gallery


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_points_of_single_precision_keep_the_distances_of_all_rows(rng, distance):
    X = 1e20 * (5 + rng.standard_normal((30, 6)))
    points, scale = single_precision(X, distance)
    assert points.dtype == np.float32
    apart = np.linalg.norm(points[:, None].astype(np.float64) - points, axis=2)
    found = 1 - apart**2 / 2 if distance == "cos" else apart / scale / 1e20
    wanted = scores(X / 1e20, X / 1e20, distance)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_scores_of_rows_are_those_of_pairs(rng):
    a, b = rng.standard_normal((2, 20, 3))
    a[4] = 0
    for distance in ("cos", "l2"):
        wanted = np.diag(scores(a, b, distance))
        assert row_scores(a, b, distance) == pytest.approx(wanted)


def test_only_rows_that_all_have_length_1_are_of_unit_length(rng):
    X = rng.standard_normal((50, 4))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    assert unit_length(X.astype(np.float32))
    X[7] *= 1.001
    assert not unit_length(X)
