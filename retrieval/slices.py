"""Rows in pieces: what does not fit the memory, or the cache, is looked at piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_BLOCK = 1 << 21  # numbers converted at a time


def slices(n: int, size: int) -> Iterator[slice]:
    """range(n) in slices of `size`, the last one shorter."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def blocks(vectors: np.ndarray) -> Iterator[slice]:
    """Slices of rows that hold a few million numbers each."""
    return slices(len(vectors), max(1, _BLOCK // max(1, vectors.shape[1])))
