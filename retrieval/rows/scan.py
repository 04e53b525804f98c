"""Read each row once: its squared length, and a hash of its direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrieval.resources import blocks, processors, run_all

NARROW = ("float16", "float32", "int8", "uint8")  # float32 holds their values


@dataclass(frozen=True)
class Scan:
    """What one pass over rows (N, D) finds."""

    square: np.ndarray  # (N,) float64: squared lengths; finite if the row is, 0 if it is of zeros
    directions: np.ndarray  # (N,) uint64, nearly always equal for parallel rows

    @property
    def hashes(self) -> np.ndarray:
        """(N,) uint64, equal for identical rows: their directions and lengths are the same."""
        return self.directions + self.square.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def take(self, rows: slice | np.ndarray) -> Scan:
        """The scan of some of the rows."""
        return Scan(self.square[rows], self.directions[rows])


def scan(vectors: np.ndarray) -> Scan | None:
    """Scan rows with the threads of this machine; None for dtypes that float32 does not hold."""
    if vectors.dtype.name not in NARROW or not vectors.dtype.isnative:
        return None
    from retrieval.rows.kernels import scan_rows

    N, D = vectors.shape
    keys = np.random.default_rng(0).integers(0, 2**64, D, dtype=np.uint64)
    found = Scan(np.empty(N), np.empty(N, np.uint64))

    def scan_part(part: slice) -> None:
        out = found.take(part)
        scan_rows(readable(vectors[part]), keys, out.square, out.directions)

    run_all(scan_part, blocks(vectors), processors())
    return found


def units(block: np.ndarray, inverse: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Rows times the inverse of their lengths, computed in float64, rounded to float32."""
    out = np.empty(block.shape, np.float32) if out is None else out
    if block.dtype.name not in NARROW:
        out[:] = block.astype(np.float64) * inverse[:, None]
        return out
    from retrieval.rows.kernels import unit_rows

    unit_rows(readable(block), inverse, out)
    return out


def readable(block: np.ndarray) -> np.ndarray:
    """Rows as the kernels take them: contiguous, read-only, float16 as its bits."""
    block = np.ascontiguousarray(block)
    if not block.flags.aligned:
        block = block.copy()
    block = block.view(np.uint16) if block.dtype == np.float16 else block.view()
    block.flags.writeable = False
    return block
