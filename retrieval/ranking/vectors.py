"""Query and gallery vectors with their norms and unit vectors, ready for counting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrieval.distances import squared_lengths
from retrieval.problem import Problem
from retrieval.resources import blocks, run_all
from retrieval.rows.identical import direction_groups
from retrieval.rows.scan import Scan, units

ULP32, ULP64 = 2.0**-24, 2.0**-53  # unit roundoffs


class Vectors:
    """Vectors (N, D) of any real dtype, perhaps memory-mapped, with class codes (N,) int64."""

    def __init__(
        self,
        vectors: np.ndarray,
        codes: np.ndarray,
        keep: int,
        threads: int,
        scanned: Scan | None = None,
    ) -> None:
        """keep: bytes that the unit vectors may take; scanned: what is known of the vectors."""
        # A read-only plain view: one compiled kernel serves arrays in memory and mapped files.
        self.vectors = np.asarray(vectors).view()
        self.vectors.flags.writeable = False
        self.codes = np.ascontiguousarray(codes, np.int64)
        N = len(self.vectors)
        self.square, self.norm = np.empty(N), np.empty(N)  # |x|^2, |x|
        self._units = None  # float32 rows of length 1, where `keep` bytes hold them
        if self.vectors.size * 4 <= keep:
            self._units = np.empty(self.vectors.shape, np.float32)
        if scanned is not None:
            self.square = scanned.square
            self._lengths(slice(None))
        if scanned is None or self._units is not None:
            work = self._measure if scanned is None else self._scale
            run_all(work, blocks(self.vectors), threads)

    def _measure(self, part: slice) -> None:
        block = self.vectors[part].astype(np.float64)
        self.square[part] = squared_lengths(block)
        self._lengths(part)
        if self._units is not None:
            block *= self.inverse(part)[:, None]
            self._units[part] = block

    def _lengths(self, part: slice) -> None:
        np.sqrt(self.square[part], out=self.norm[part])

    def inverse(self, part: slice | np.ndarray) -> np.ndarray:
        """1 / |x|, and 0 for zero rows."""
        norm = self.norm[part]
        return np.divide(1.0, norm, out=np.zeros_like(norm), where=norm > 0)

    def _scale(self, part: slice) -> None:
        if self._units is not None:
            units(self.vectors[part], self.inverse(part), out=self._units[part])

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]

    def units(self, part: slice | np.ndarray) -> np.ndarray:
        """Rows of length 1 in float32; zero rows stay zero."""
        if self._units is None:
            return units(self.vectors[part], self.inverse(part))
        # Unlike an index, `take` lets other threads work meanwhile.
        return self._units[part] if isinstance(part, slice) else self._units.take(part, axis=0)

    @property
    def keeps_units(self) -> bool:
        """Whether the unit vectors are in memory."""
        return self._units is not None

    def units64(self, part: slice | np.ndarray) -> np.ndarray:
        """Rows of length 1 in float64; zero rows stay zero."""
        return self.vectors[part].astype(np.float64) * self.inverse(part)[:, None]

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """An array that a kernel can read, and the positions of the rows `index` in it."""
        flags = self.vectors.flags
        if self.vectors.dtype in (np.float32, np.float64) and flags.c_contiguous and flags.aligned:
            return self.vectors, index
        wanted, position = np.unique(index, return_inverse=True)
        dtype = np.float64 if self.vectors.dtype.itemsize > 4 else np.float32
        gathered = self.vectors[wanted].astype(dtype)
        gathered.flags.writeable = False
        return gathered, position


@dataclass(frozen=True)
class Prepared:
    """A problem with all that is computed once for its vectors."""

    queries: Vectors
    gallery: Vectors  # the same object as `queries` where every gallery item is a query
    self_ids: np.ndarray  # (Q,) the gallery row that is the query itself, -1: none
    positive_counts: np.ndarray  # (Q,)
    groups: dict[str, np.ndarray]  # distance -> (G,); a group is equally near to any query
    lattice: bool  # squared l2 distances in float64 have no error
    scale: float  # a power of two that brings all norms below 2^60
    distances: tuple[str, ...]
    threads: int

    @property
    def symmetric(self) -> bool:
        """Whether one half of the product serves both sides."""
        return self.queries is self.gallery

    def self_columns(self, q: slice, g: slice) -> np.ndarray:
        """(A,) the column of each query itself in a tile of queries q and items g, or -1."""
        column = self.self_ids[q] - g.start
        return np.where((column >= 0) & (column < g.stop - g.start), column, -1)


def prepare(problem: Problem, distances: tuple[str, ...], memory: int, threads: int) -> Prepared:
    """Measure the vectors of a problem and find out how exact float64 is for them."""
    gallery, *others = whole_multiples(
        [problem.gallery] if problem.queries is None else [problem.gallery, problem.queries]
    )
    # The scan is that of the vectors as they were given.
    known = problem.gallery_scan if gallery is problem.gallery else None
    items = Vectors(gallery, problem.gallery_codes, memory // 4, threads, known)
    queries = items
    if others:
        scanned = problem.query_scan if others[0] is problem.queries else None
        queries = Vectors(others[0], problem.query_codes, memory // 4, threads, scanned)
    groups = {"l2": problem.gallery_groups}
    if "cos" in distances:
        groups["cos"] = direction_groups(items.vectors, items.units, problem.gallery_groups, known)
    top = max(queries.norm.max(initial=0.0), items.norm.max(initial=0.0))
    return Prepared(
        queries=queries,
        gallery=items,
        self_ids=problem.self_ids,
        positive_counts=problem.positive_counts,
        groups=groups,
        lattice=is_lattice(queries, items),
        # Float32 holds the squares from 2^120 down to 2^-100: one huge row leaves room for others.
        scale=2.0 ** (60 - np.ceil(np.log2(top))) if top > 0 else 1.0,
        distances=distances,
        threads=threads,
    )


# Vectors that are whole multiples of one number


def lattice_step(top: float, dim: int) -> float:
    """The finest power of two whose multiples up to `top` have exact float64 sums of products."""
    bits = int((50 - np.log2(dim)) // 2) - 1
    return float(2.0 ** (np.floor(np.log2(top)) + 1 - bits)) if top > 0.0 else 1.0


def integers_of(rows: np.ndarray, unit: float) -> np.ndarray | None:
    """The rows in multiples of `unit`, or None where they are not whole multiples."""
    scaled = rows / unit
    whole = np.array_equal(scaled, np.rint(scaled))
    # A quotient that underflowed to zero would pass for an integer.
    return scaled if whole and np.count_nonzero(scaled) == np.count_nonzero(rows) else None


def is_lattice(queries: Vectors, gallery: Vectors) -> bool:
    """Whether all vectors are multiples of one step so coarse that float64 squares are exact.

    True of int8 and binary codes, where ties are many and real.
    """
    both = (gallery,) if queries is gallery else (queries, gallery)
    top = max(float(np.sqrt(side.square.max(initial=0.0))) for side in both)
    unit = lattice_step(top, gallery.dim)
    return all(
        integers_of(side.vectors[part].astype(np.float64), unit) is not None
        for size in (1, 64, len(gallery) + len(queries))  # a few rows usually settle it
        for side in both
        for part in blocks(side.vectors[:size])
    )


def whole_multiples(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The same vectors in multiples of their smallest entry, if all are: codes times a constant.

    Neither ranking changes, and as integers they have exact distances. Others return as they are.
    """
    if any(array.dtype.kind != "f" for array in arrays):
        return arrays
    some = np.abs(np.concatenate([array[:64].ravel() for array in arrays]).astype(np.float64))
    unit = some[some > 0].min(initial=np.inf)
    # A power of two is a lattice already; what is tiny has digits below the least float.
    if not 1e-250 < unit < np.inf or np.frexp(unit)[0] == 0.5:
        return arrays
    some_rows = (array[:rows] for rows in (1, 64) for array in arrays)  # they usually settle it
    if any(_multiples(rows, unit) is None for rows in some_rows):
        return arrays
    whole = [found for array in arrays if (found := _multiples(array, unit)) is not None]
    return whole if len(whole) == len(arrays) else arrays


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
