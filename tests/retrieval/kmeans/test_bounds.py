"""Short forms: their products are bounds, and k-means with them gives what it gives without."""

import numpy as np
import pytest

from retrieval.kmeans import bounds, lloyd, seeding


def decaying(N: int = 4000, D: int = 192, C: int = 800, seed: int = 0) -> np.ndarray:
    """Unit rows in classes, with less and less variance from direction to direction."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(C, D))[np.arange(N) % C] + 0.8 * rng.normal(size=(N, D))
    x = x / np.arange(1, D + 1) @ np.linalg.qr(rng.normal(size=(D, D)))[0]
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def test_products_of_short_forms_are_upper_bounds():
    x = decaying()
    short = bounds.short_forms(x)
    assert short is not None
    assert short.points.shape[1] < 100
    others = decaying(seed=1)[:300]
    exact = x.astype(np.float64) @ others.T.astype(np.float64)
    excess = short.points @ short.of(others).T - exact
    assert excess.min() > -1e-6
    assert np.median(excess) < 0.2


def test_points_that_vary_in_all_directions_have_no_short_form():
    assert bounds.short_forms(np.random.default_rng(0).normal(size=(500, 64))) is None


@pytest.mark.parametrize("kind", ["random", "k-means++"])
@pytest.mark.parametrize("most", [0, 1, 300])
def test_every_point_is_with_its_nearest_centroid(kind, most):
    x = decaying()
    short = bounds.short_forms(x)
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
