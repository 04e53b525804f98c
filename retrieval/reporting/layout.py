"""Lay out the map of a report: embeddings as points in the plane, by t-SNE or PCA."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from retrieval.distances import unit_rows

DIMENSIONS = 50  # left by PCA for t-SNE
STEPS = 500  # of t-SNE; twice as many raised the trustworthiness from 0.872 to 0.875
FEWEST = 10  # points that t-SNE can say more about than PCA


def plane(
    vectors: np.ndarray, rows: np.ndarray, distance: str, method: str, seed: int
) -> tuple[str, np.ndarray]:
    """The name of the method used, and (n, 2) within 0 and 1, both axes to one scale.

    method: tsne or pca; too few points, or points that are all the same, get PCA.
    """
    points = vectors[rows].astype(np.float64)
    points = unit_rows(points) if distance == "cos" else points / (np.abs(points).max() or 1.0)
    flat = _principal(points)
    if method == "tsne" and len(rows) >= FEWEST and np.ptp(flat, axis=0).max() > 0:
        found = _tsne(flat, seed)
        if np.isfinite(found).all():
            return "t-SNE", _fitted(found)
    return "PCA", _fitted(flat[:, :2])


def _principal(points: np.ndarray) -> np.ndarray:
    """(n, 2 .. 50) coordinates along the main directions; columns of zeros where there are none."""
    from sklearn.decomposition import PCA

    model = PCA(min(DIMENSIONS, *points.shape), svd_solver="full")
    with np.errstate(invalid="ignore"):  # shares of a variance of zero
        out = model.fit_transform(points)
    # What rounding leaves of points that are all the same is no direction.
    size = model.singular_values_
    out[:, size <= max(size.max() * 1e-12, np.linalg.norm(points) * 1e-14)] = 0
    return np.pad(out, ((0, 0), (0, max(0, 2 - out.shape[1]))))


def _tsne(points: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE

    start = points[:, :2] / points[:, 0].std() * 1e-4  # as scikit-learn's own init="pca"
    perplexity = min(30.0, (len(points) - 1) / 3)
    start = start.astype(np.float32)
    model = TSNE(2, perplexity=perplexity, max_iter=STEPS, init=start, random_state=seed)
    with threadpool_limits(1):  # its loops are short: threads that wait for each other took longer
        return model.fit_transform(points.astype(np.float32)).astype(np.float64)


def _fitted(points: np.ndarray) -> np.ndarray:
    low, high = points.min(axis=0), points.max(axis=0)
    size = (high - low).max()
    return np.full(points.shape, 0.5) if size <= 0 else 0.5 + (points - (low + high) / 2) / size
