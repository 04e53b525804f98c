"""The vectors on one side of a retrieval, queries or gallery, as the engine wants to see them."""

from __future__ import annotations

from functools import partial

import numpy as np

from retrieval.errors import DmlError
from retrieval.resources import blocks, run_all

ULP32, ULP64 = 2.0**-24, 2.0**-53  # unit roundoffs


class Side:
    """Vectors (N, D) of any real dtype, perhaps memory-mapped, with labels (N,) as int64 codes."""

    def __init__(self, vectors: np.ndarray, labels: np.ndarray, keep: int, threads: int) -> None:
        # A read-only plain view: one compiled kernel serves arrays in memory and mapped files.
        self.vectors = np.asarray(vectors).view()
        self.vectors.flags.writeable = False
        self.labels = np.ascontiguousarray(labels, np.int64)
        N = len(self.vectors)
        self.square, self.norm, self.inverse = np.empty(N), np.empty(N), np.zeros(N)  # of |x|
        self._units = None  # float32 rows of length 1, where `keep` bytes hold them
        if self.vectors.size * 4 <= keep:
            self._units = np.empty(self.vectors.shape, np.float32)
        run_all([(partial(self._measure, part), 1) for part in blocks(self.vectors)], threads)

    def _measure(self, part: slice) -> None:
        block = self.vectors[part].astype(np.float64)
        square = self.square[part] = np.einsum("ij,ij->i", block, block)
        lost = ~(square <= 1e280) | (square < 1e-280)
        if lost.any() and np.any(block[lost] != 0):
            size = np.abs(block[lost]).max(axis=1)
            raise DmlError(
                f"A vector of size {size[size > 0][0]:.1e} cannot be compared in float64.",
                "Squared distances of vectors above 1e140 or below 1e-140 leave its range.",
                "Rescale the vectors: neither distance's ranking changes.",
            )
        norm = self.norm[part] = np.sqrt(square)
        self.inverse[part] = np.divide(1.0, norm, out=np.zeros_like(norm), where=norm > 0)
        if self._units is not None:
            block *= self.inverse[part, None]
            self._units[part] = block

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        return self.vectors.shape[1]

    def units(self, part: slice) -> np.ndarray:
        """Rows of length 1 in float32; zero rows stay zero."""
        if self._units is None:
            return self.units64(part).astype(np.float32)
        return self._units[part]

    def units64(self, part: slice | np.ndarray) -> np.ndarray:
        return self.vectors[part].astype(np.float64) * self.inverse[part, None]

    def rows(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """An array a kernel can read and the positions of the rows `index` in it."""
        flags = self.vectors.flags
        if self.vectors.dtype in (np.float32, np.float64) and flags.c_contiguous and flags.aligned:
            return self.vectors, index
        wanted, position = np.unique(index, return_inverse=True)
        dtype = np.float64 if self.vectors.dtype.itemsize > 4 else np.float32
        gathered = self.vectors[wanted].astype(dtype)
        gathered.flags.writeable = False
        return gathered, position
