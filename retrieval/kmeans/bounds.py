"""Short forms of vectors, whose products bound those of the vectors from above.

Embeddings vary much in some directions and little in all others. With a the part of x in the first
directions and b the rest, x y = a a' + b b' is at most a a' + |b| |b'|: a product of vectors that
have |b| as one more dimension. Most centroids are ruled out by it at a fraction of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

REST = 0.1  # of the squared lengths that may be left to the other directions
SAMPLE = 4096  # points that show in which directions the points vary
STEP = 32  # the number of directions is a multiple of it
LONGEST = 0.5  # of the dimensions: with more directions a short form saves too little
ROUNDING = np.float32(1e-6)  # of the squared length
DENSE = 32  # if more than one in so many products has to be computed, all are, by BLAS


@dataclass(frozen=True)
class Short:
    """Short forms of all points, and how to make those of other vectors."""

    directions: np.ndarray  # (D, H) orthonormal columns
    points: np.ndarray  # (N, H + 1)

    def of(self, rows: np.ndarray) -> np.ndarray:
        return _shortened(rows, self.directions)


def short_forms(points: np.ndarray) -> Short | None:
    """Short forms of these points, unless they vary in too many directions."""
    N, D = points.shape
    sample = points[:: max(1, N // SAMPLE)].astype(np.float64)
    values, vectors = np.linalg.eigh(sample.T @ sample)
    rest = 1 - np.cumsum(values[::-1]) / max(values.sum(), np.finfo(np.float64).tiny)
    H = STEP * (int(np.argmax(rest <= REST)) // STEP + 1)
    if H > LONGEST * D:
        return None
    directions = np.ascontiguousarray(vectors[:, ::-1][:, :H], np.float32)
    return Short(directions, _shortened(points, directions))


def _shortened(rows: np.ndarray, directions: np.ndarray) -> np.ndarray:
    out = np.empty((len(rows), directions.shape[1] + 1), np.float32)
    out[:, :-1] = rows @ directions
    whole = np.einsum("ij,ij->i", rows, rows)
    rest = whole - np.einsum("ij,ij->i", out[:, :-1], out[:, :-1])
    out[:, -1] = np.sqrt(np.maximum(rest, 0) + ROUNDING * whole)
    return out
