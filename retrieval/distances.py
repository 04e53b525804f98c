"""The distances l2 and cos: their names, and vectors as points with these distances.

The squared Euclidean distance of two points is that of l2, or the squared chord 2 - 2 cos. For cos
the points are unit vectors, for l2 the vectors times a power of two. Both are shifted by the mean
of the gallery, which changes no distance: float32 then keeps more digits of the differences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from retrieval.errors import DmlError
from retrieval.resources import processors, run_all, slices

DISTANCES = ("l2", "cos")  # in the order in which they are shown everywhere
NAMES = {"l2": "Euclidean", "cos": "cosine"}
AXES = {"l2": "Euclidean distance", "cos": "cosine similarity"}  # titles of the axes of charts
UNIT = 1e-5  # by how much a length of 1 may be off in float32
TIE = 1e-12  # cosines this close, and distances relative to themselves, are equal ...
UNIT_TIE = 1e-14  # ... and chords of unit vectors this close: normalising rounds
_CHUNK = 1 << 19  # numbers converted at a time: small enough for the cache to help


@dataclass(frozen=True)
class Space:
    """How vectors become points."""

    distance: str
    scale: float  # l2: a power of two, exact, that keeps squares within float32
    apart: bool  # cos: zero rows, whose cosine is 0 with all, get an axis of their own on each side
    centre: np.ndarray  # (D',) mean of the gallery, float64

    @property
    def width(self) -> int:
        return len(self.centre)

    def points(
        self,
        vectors: np.ndarray,
        rows: slice | np.ndarray,
        *,
        query: bool = False,
        dtype: DTypeLike = np.float64,
    ) -> np.ndarray:
        """The points (n, D') of some rows, which are queries or gallery items."""
        some = vectors[rows]  # a slice of a memory map is read below
        out: np.ndarray = np.empty((len(some), self.width), dtype)

        def fill(part: slice) -> None:
            out[part] = self._plain(some[part], query) - self.centre

        run_all(fill, _chunks(len(some), self.width), processors())
        return out

    def _plain(self, rows: np.ndarray, query: bool) -> np.ndarray:
        x = np.asarray(rows, dtype=np.float64)
        if self.distance == "l2":
            return x * self.scale
        unit = unit_rows(x)
        if self.apart:
            unit = np.pad(unit, ((0, 0), (0, 2)))
            unit[~x.any(axis=1), -1 if query else -2] = 1.0
        return unit

    def score(self, squared: np.ndarray) -> np.ndarray:
        """Squared distances of points as cosines, or as distances of the vectors themselves."""
        return 1 - squared / 2 if self.distance == "cos" else np.sqrt(squared) / self.scale


def space_of(queries: np.ndarray, gallery: np.ndarray, distance: str) -> Space:
    """Find the scale and the centre for these vectors, which are finite."""
    total, top, apart = np.zeros(gallery.shape[1]), 0.0, False
    for vectors in [gallery] if queries is gallery else [gallery, queries]:
        for part in _chunks(*vectors.shape):
            x = np.asarray(vectors[part], dtype=np.float64)
            top = max(top, float(x.max(initial=0.0)), -float(x.min(initial=0.0)))
            apart |= distance == "cos" and not x.any(axis=1).all()
            if vectors is gallery:
                total += (unit_rows(x) if distance == "cos" else x).sum(axis=0)
    centre = total / max(1, len(gallery))
    if distance == "cos":
        return Space("cos", 1.0, apart, np.append(centre, [0.0, 0.0]) if apart else centre)
    scale = 2.0 ** -int(np.clip(np.frexp(top)[1], -1000, 1000))
    return Space("l2", scale, False, centre * scale)


def single_precision(vectors: np.ndarray, distance: str) -> tuple[np.ndarray, float]:
    """All rows (N, D) as float32 points about their mean, and the scale.

    cos: rows of length 1, zero rows at the origin.
    """
    space = space_of(vectors, vectors, distance)
    if space.apart:
        space = Space("cos", 1.0, False, space.centre[:-2])
    return space.points(vectors, slice(None), dtype=np.float32), space.scale


def unit_length(vectors: np.ndarray) -> bool:
    """Whether all rows have length 1 within float32: cos and l2 are the same space then."""
    parts = (vectors[part].astype(np.float64) for part in _chunks(*vectors.shape))
    return all((np.abs(np.linalg.norm(x, axis=1) - 1) <= UNIT).all() for x in parts)


def _chunks(rows: int, width: int) -> Iterator[slice]:
    return slices(rows, max(16, _CHUNK // max(1, width)))


def squared_lengths(x: np.ndarray) -> np.ndarray:
    """(n,) |x|^2 of finite float64 rows; raise where it leaves the range of float64."""
    square = np.einsum("ij,ij->i", x, x)
    lost = ~(square <= 1e280) | (square < 1e-280)
    if lost.any() and np.any(x[lost] != 0):
        size = np.abs(x[lost]).max(axis=1)
        raise DmlError(
            f"A vector of size {size[size > 0][0]:.1e} cannot be compared in float64.",
            "Squared distances of vectors above 1e140 or below 1e-140 leave its range.",
            "Rescale the vectors: neither distance's ranking changes.",
        )
    return square


def unit_rows(x: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; rows of zeros stay zeros."""
    norm = np.sqrt(np.einsum("ij,ij->i", x, x))
    return x / np.where(norm > 0, norm, 1.0)[:, None]


def largest_equal(squared: float | np.ndarray, tie: float = TIE) -> Any:
    """The largest squared distances of points that count as equal to these ones."""
    return np.square(np.sqrt(squared) * (1 + tie / 2) + UNIT_TIE)


def row_scores(a: np.ndarray, b: np.ndarray, distance: str) -> np.ndarray:
    """(n,) cosines or Euclidean distances of vectors (n, D), row by row; of zeros, the cosine 0."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if distance == "cos":
        a, b = unit_rows(a), unit_rows(b)
    squared = np.einsum("ij,ij->i", a - b, a - b)
    if distance == "l2":
        return np.sqrt(squared)
    return np.where(a.any(axis=1) & b.any(axis=1), 1 - squared / 2, 0.0)
