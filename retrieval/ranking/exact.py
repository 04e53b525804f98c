"""Exact comparison of two distances, for the few pairs that float64 cannot tell apart.

Every float is an integer times a power of two, so squared distances, dot products and squared
norms are integers too: Python compares them without rounding.
"""

from __future__ import annotations

import numpy as np


def compare(query: np.ndarray, item: np.ndarray, best: np.ndarray, distance: str) -> np.ndarray:
    """For rows (M, D): 1 where item is nearer to query than best is, 0 equal, -1 farther."""
    rows = np.stack([query, item, best]).astype(np.float64)  # (3, M, D)
    small = _small_integers(rows)
    if small is not None:
        if distance == "l2":
            nearer = ((small[0] - small[2]) ** 2).sum(-1) - ((small[0] - small[1]) ** 2).sum(-1)
            return np.sign(nearer).astype(np.int8)
        dots = [(a * b).sum(-1) for a, b in _cos_pairs(small)]
        return np.array([_cos_sign(*map(int, row)) for row in zip(*dots, strict=True)], np.int8)
    out = np.zeros(rows.shape[1], np.int8)
    for m in np.flatnonzero(_open(rows, distance)):
        out[m] = _compare_one(rows[:, m], distance)
    return out


def _open(rows: np.ndarray, distance: str) -> np.ndarray:
    """(M,) False where zeros alone show a tie: query at a right angle to item and best."""
    if distance == "l2":
        return np.ones(rows.shape[1], bool)
    query, item, best = rows != 0
    return (query & (item | best)).any(axis=-1)


def _cos_pairs(rows):
    query, item, best = rows
    return (query, item), (query, best), (item, item), (best, best)


def _cos_sign(qi: int, qb: int, ii: int, bb: int) -> int:
    """The sign of qi/sqrt(ii) - qb/sqrt(bb); the cosine of a zero row is 0."""
    left = qi * abs(qi) * bb if ii and bb else qi * abs(qi) if ii else 0
    right = qb * abs(qb) * ii if ii and bb else qb * abs(qb) if bb else 0
    return (left > right) - (left < right)


def _compare_one(rows: np.ndarray, distance: str) -> int:
    # Coordinates that add nothing, or the same to both distances, are left out.
    item, best = rows[1:]
    query, item, best = _integers(
        rows[:, item != best if distance == "l2" else (item != 0) | (best != 0)]
    )
    if distance == "l2":
        to_best = sum((q - b) ** 2 for q, b in zip(query, best, strict=True))
        to_item = sum((q - i) ** 2 for q, i in zip(query, item, strict=True))
        return (to_best > to_item) - (to_best < to_item)
    pairs = _cos_pairs((query, item, best))
    return _cos_sign(*(sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs))


def _integers(rows: np.ndarray) -> list[list[int]]:
    """The rows times one power of two that makes all of them integers."""
    mantissa, exponent = np.frexp(rows)
    digits = (mantissa * 2.0**53).astype(np.int64)
    used = exponent[digits != 0]
    lowest = int(used.min()) if used.size else 0
    shift = np.where(digits != 0, exponent - lowest, 0)
    return [
        [int(d) << int(s) for d, s in zip(*row, strict=True)]
        for row in zip(digits, shift, strict=True)
    ]


def step(top: float, dim: int) -> float:
    """The finest power of two whose multiples up to `top` have exact float64 sums of products."""
    bits = int((50 - np.log2(dim)) // 2) - 1
    return float(2.0 ** (np.floor(np.log2(top)) + 1 - bits)) if top > 0.0 else 1.0


def integers_of(rows: np.ndarray, unit: float) -> np.ndarray | None:
    """The rows in multiples of `unit`, or None where they are not whole multiples."""
    scaled = rows / unit
    whole = np.array_equal(scaled, np.rint(scaled))
    # A quotient that underflowed to zero would pass for an integer.
    return scaled if whole and np.count_nonzero(scaled) == np.count_nonzero(rows) else None


def _small_integers(rows: np.ndarray) -> np.ndarray | None:
    unit = step(float(np.abs(rows).max(initial=0.0)), rows.shape[-1])
    return integers_of(rows, unit) if 1e-290 < unit < 1e290 else None
