"""The map of a report."""

import numpy as np

from retrieval.reporting import layout


def test_the_map_keeps_classes_together_and_repeats(rng):
    labels = np.arange(120) % 3
    X = 8 * np.eye(3, 20)[labels] + rng.standard_normal((120, 20))
    name, points = layout.plane(X, np.arange(120), "l2", "tsne", 1)
    assert name == "t-SNE"
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(apart, np.inf)
    assert (labels[apart.argmin(1)] == labels).mean() > 0.95
    np.testing.assert_array_equal(points, layout.plane(X, np.arange(120), "l2", "tsne", 1)[1])


def test_points_that_are_all_the_same_are_no_cloud():
    X = np.full((60, 8), 0.1, np.float32)
    for distance in ("cos", "l2"):
        name, points = layout.plane(X, np.arange(60), distance, "tsne", 0)
        assert name == "PCA"
        assert (points == 0.5).all()
