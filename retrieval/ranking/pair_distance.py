"""Single pairs of query and item: their distance in float64 with its error, then exactly."""

from __future__ import annotations

import numpy as np

from retrieval.ranking import exact, kernels
from retrieval.ranking.vectors import ULP64, Side
from retrieval.resources import blocks

_EXACT_ROWS = 1024  # rows compared exactly at a time


def measure(
    asks: Side, q: np.ndarray, items: Side, g: np.ndarray, lattice: bool
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Squared distances of the pairs (q[n], g[n]) and bounds of their errors, for cos and l2.

    For cos it is the squared chord 2 - 2 cos. On a lattice l2 has no error.
    """
    l2, cos = np.empty(len(q)), np.empty(len(q))
    Q, q_row = asks.rows(q)
    G, g_row = items.rows(g)
    kernels.pair_distances(Q, q_row, G, g_row, asks.inverse[q], items.inverse[g], l2, cos)
    dim = items.dim
    l2_error = np.zeros_like(l2) if lattice else (dim + 8) * ULP64 * l2 + 1e-290
    # Lengths are known to D/2 ulp (scales both vectors), coordinates of unit vectors to one.
    cos_error = (4 * dim + 32) * ULP64 * cos + 6 * ULP64 * np.sqrt(cos)
    cos_error += ((dim + 16) * ULP64) ** 2
    cos_error[(asks.norm[q] == 0) | (items.norm[g] == 0)] = 0  # 2 by definition
    return {"cos": (cos, cos_error), "l2": (l2, l2_error)}


def compare_exactly(
    asks: Side, q: np.ndarray, items: Side, g: np.ndarray, best: np.ndarray, distance: str
) -> np.ndarray:
    """1 where item g[n] is nearer to query q[n] than item best[n], 0 equal, -1 farther."""
    out = np.empty(len(q), np.int8)
    for start in range(0, len(q), _EXACT_ROWS):
        n = slice(start, start + _EXACT_ROWS)
        rows = asks.vectors[q[n]], items.vectors[g[n]], items.vectors[best[n]]
        out[n] = exact.compare(*rows, distance)
    return out


def is_lattice(asks: Side, items: Side) -> bool:
    """Are all vectors multiples of one step so coarse that float64 squares add up exactly?

    True of int8 and binary codes, where ties are many and real.
    """
    top = max(float(np.sqrt(side.square.max(initial=0.0))) for side in (asks, items))
    unit = exact.step(top, items.dim)
    sides = (items,) if asks is items else (asks, items)
    return all(
        exact.integers_of(side.vectors[part].astype(np.float64), unit) is not None
        for size in (64, len(items) + len(asks))  # a few rows usually settle it
        for side in sides
        for part in blocks(side.vectors[:size])
    )


def whole_multiples(sides: list[np.ndarray]) -> list[np.ndarray]:
    """The same vectors in multiples of their smallest entry, if all are: codes times a constant.

    Neither ranking changes, and as integers they have exact distances. Others return as they are.
    """
    if any(side.dtype.kind != "f" for side in sides):
        return sides
    some = np.abs(np.concatenate([side[:64].ravel() for side in sides]).astype(np.float64))
    unit = some[some > 0].min(initial=np.inf)
    # A power of two is a lattice already; what is tiny has digits below the least float.
    if not 1e-250 < unit < np.inf or np.frexp(unit)[0] == 0.5:
        return sides
    if any(_multiples(side[:64], unit) is None for side in sides):  # a few rows usually settle it
        return sides
    whole = [_multiples(side, unit) for side in sides]
    return sides if any(side is None for side in whole) else whole


def _multiples(vectors: np.ndarray, unit: float) -> np.ndarray | None:
    digits, exponent = np.frexp(unit)
    high = np.ldexp(np.floor(np.ldexp(digits, 33)), exponent - 33)  # the first 33 bits of the unit
    low = unit - high  # at most 20 bits: products with multiples of 20 bits are exact
    out = np.empty(vectors.shape, np.float32)
    for part in blocks(vectors):
        block = vectors[part].astype(np.float64)
        with np.errstate(over="ignore"):
            multiple = np.rint(block / unit)
        if np.abs(multiple).max() > 2**20 or (block - multiple * high != multiple * low).any():
            return None
        out[part] = multiple
    return out
