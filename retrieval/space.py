"""The space in which both distances are squared Euclidean, for FAISS.

cos: unit vectors; l2: the raw rows, times a power of two. Distances survive a shift, so FAISS sees
the rows relative to the gallery's mean: float32 then spends its digits on what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from retrieval.errors import DmlError
from retrieval.resources import processors, run_all, slices

Rows = slice | np.ndarray
MEMORY = 2 << 30
TIE = 1e-12  # distances this close, relative to themselves, are equal ...
UNIT_TIE = 1e-14  # ... and chords of unit vectors this close: normalising rounds


def single_precision(
    vectors: np.ndarray, distance: str, memory: int = MEMORY
) -> tuple[np.ndarray, float]:
    """All rows (N, D) as float32 about their mean, and the factor they were multiplied by.

    For what only squared distances matter to. cos: rows of length 1, zero rows at the origin.
    """
    space = space_of(vectors, vectors, distance, memory)
    if space.apart:
        space = Space("cos", 1.0, False, space.centre[:-2])
    return float32_rows(space, vectors, slice(None), False, memory), space.scale


@dataclass(frozen=True)
class Space:
    distance: str
    scale: float  # l2: a power of two, exact, that keeps squares within float32
    apart: bool  # cos: there are zero rows; cosine 0 with all puts each side on an axis of its own
    centre: np.ndarray  # (D',) mean of the gallery, float64

    @property
    def width(self) -> int:
        return len(self.centre)


def space_of(queries: np.ndarray, gallery: np.ndarray, distance: str, memory: int) -> Space:
    if distance not in ("cos", "l2"):
        raise DmlError(
            f'The distance "{distance}" is not known.',
            "Distances are cos and l2.",
            "Choose one of these.",
        )
    sides = [gallery] if queries is gallery else [gallery, queries]
    total, top, apart = np.zeros(gallery.shape[1]), 0.0, False
    for side in sides:
        for part in slices(len(side), _chunk(gallery.shape[1], memory)):
            x = np.asarray(side[part], dtype=np.float64)
            size = float(max(x.max(initial=0.0), -x.min(initial=0.0)))
            if not np.isfinite(size):
                raise DmlError(
                    "The embeddings contain NaN or infinite values.",
                    "They have no distance to anything.",
                    "Export them again, or drop those rows.",
                )
            top = max(top, size)
            if distance == "cos":
                apart |= not x.any(axis=1).all()
            if side is gallery:
                total += (_unit(x) if distance == "cos" else x).sum(axis=0)
    centre = total / max(1, len(gallery))
    if distance == "cos":
        return Space("cos", 1.0, apart, np.append(centre, [0.0, 0.0]) if apart else centre)
    scale = 2.0 ** -int(np.clip(np.frexp(top)[1], -1000, 1000))
    return Space("l2", scale, False, centre * scale)


def _unit(x: np.ndarray) -> np.ndarray:
    norm = np.sqrt(np.einsum("ij,ij->i", x, x))
    return x / np.where(norm > 0, norm, 1.0)[:, None]


def _exact(space: Space, vectors: np.ndarray, rows: Rows, asks: bool) -> np.ndarray:
    """float64 rows (n, D') whose squared distances are the scores."""
    x = np.asarray(vectors[rows], dtype=np.float64)
    if space.distance == "l2":
        return x * space.scale
    unit = _unit(x)
    if space.apart:
        unit = np.pad(unit, ((0, 0), (0, 2)))
        unit[~x.any(axis=1), -1 if asks else -2] = 1.0
    return unit


def float64_rows(
    space: Space, vectors: np.ndarray, rows: np.ndarray, asks: bool, memory: int
) -> np.ndarray:
    """`_exact` chunk by chunk: temporaries stay in the cache, and small."""
    out = np.empty((len(rows), space.width))

    def fill(part: slice) -> None:
        out[part] = _exact(space, vectors, rows[part], asks)

    each(fill, slices(len(rows), _chunk(space.width, memory)))
    return out


def float32_rows(
    space: Space, vectors: np.ndarray, rows: Rows, asks: bool, memory: int
) -> np.ndarray:
    """The rows relative to the centre (n, D'), for FAISS."""
    ids = np.arange(len(vectors))[rows]
    out = np.empty((len(ids), space.width), np.float32)

    def fill(part: slice) -> None:
        # A slice reads a memory map in order; an index array would copy first.
        inner = slice(ids[part][0], ids[part][-1] + 1) if isinstance(rows, slice) else ids[part]
        out[part] = _exact(space, vectors, inner, asks) - space.centre

    each(fill, slices(len(ids), _chunk(space.width, memory)))
    return out


def each(work: Callable[[slice], None], parts: Iterable[slice]) -> None:
    """Runs work on every part, in threads: NumPy and the kernels free the GIL."""
    run_all([(partial(work, part), 1) for part in parts], processors())


def _chunk(width: int, memory: int) -> int:
    """Rows of float64 to convert at a time: small enough for the cache to help."""
    return max(16, min(memory // 64, 4 << 20) // (8 * max(1, width)))
