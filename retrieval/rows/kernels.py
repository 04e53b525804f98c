"""Compiled loops over single rows: widen float16, add up squares, hash, scale to length 1.

float16, which numba does not know, comes as uint16: the bits of its numbers.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from retrieval.resources import compiled


def _widen(row, out):
    """Write a row as float32. Compiled loops take `_widen_of` instead."""
    out[:] = row.view(np.float16) if row.dtype == np.uint16 else row


@overload(_widen)
def _widen_of(row, out):
    if row.dtype.name == "uint16":
        return _widen_half
    return _widen_other


def _widen_half(row, out):
    # The exponent and the digits of a half, shifted to those of a float32, are the number times
    # 2^-112, also below the smallest normal half. Infinity and NaN have all bits of the exponent.
    bits = out.view(np.uint32)
    for k in range(len(row)):
        bits[k] = (np.uint32(row[k]) & np.uint32(0x7FFF)) << np.uint32(13)
    for k in range(len(row)):
        out[k] *= np.float32(2.0**112)
    for k in range(len(row)):
        half = np.uint32(row[k])
        special = (half & np.uint32(0x7C00)) == np.uint32(0x7C00)
        exponent = np.uint32(0x7F800000) if special else np.uint32(0)
        bits[k] |= exponent | ((half & np.uint32(0x8000)) << np.uint32(16))


def _widen_other(row, out):
    for k in range(len(row)):
        out[k] = np.float32(row[k])


@compiled
def _square(row):
    """The sum of squares in float64."""
    total = 0.0
    for k in range(len(row)):
        total += np.float64(row[k]) * np.float64(row[k])
    return total


@compiled(fastmath=False)
def _mixed(w):
    """The finaliser of SplitMix64: every bit of a word reaches every bit of the result.

    Numbers with few digits differ in a few high bits only; multiplied and added up, they would
    have equal hashes.
    """
    w = (w ^ (w >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    w = (w ^ (w >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return w ^ (w >> np.uint64(31))


@compiled(fastmath=False)
def _hash(row, keys):
    """Hash the bits of float32 numbers."""
    words, h = row.view(np.uint32), np.uint64(0)
    for k in range(len(words)):
        word = words[k] if words[k] != np.uint32(0x80000000) else np.uint32(0)  # -0 is 0
        h += _mixed(np.uint64(word) + keys[k])
    return h


@compiled(fastmath=False)
def hash_rows(words, keys, out):
    """Hash each row of words (N, D) to 64 bits."""
    N, D = words.shape
    for i in range(N):
        h = np.uint64(0)
        for k in range(D):
            h += _mixed(np.uint64(words[i, k]) + keys[k])
        out[i] = h


@compiled(fastmath=False)
def _scaled(row, factor, out):
    for k in range(len(row)):
        out[k] = np.float32(np.float64(row[k]) * factor)


@compiled(fastmath=False)
def scan_rows(rows, keys, square, directions):
    """Fill in what `scan.Scan` holds for rows (n, D)."""
    n, D = rows.shape
    row, unit = np.empty(D, np.float32), np.empty(D, np.float32)
    for i in range(n):
        _widen(rows[i], row)
        square[i] = _square(row)
        length = np.sqrt(square[i])
        _scaled(row, 1.0 / length if length > 0 else 0.0, unit)
        directions[i] = _hash(unit, keys)


@compiled(fastmath=False)
def unit_rows(rows, inverse, out):
    """Write rows (n, D) times their factor `inverse` (n,)."""
    n, D = rows.shape
    row = np.empty(D, np.float32)
    for i in range(n):
        _widen(rows[i], row)
        _scaled(row, inverse[i], out[i])
