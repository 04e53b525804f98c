"""The code that differs between devices: multiply two blocks of vectors and count pairs.

Everything around it is shared: thresholds and margins (`thresholds`), and the exact decision of the
pairs that float32 leaves open (`tiles`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from retrieval.ranking.position_kernels import Counted


class Tile(NamedTuple):
    """The cosines of some queries and some gallery items, on the device of a backend."""

    product: Any  # (A, B) float32; NaN where a query meets itself, which compares false
    q: slice  # the queries
    g: slice  # the gallery items
    transposed: bool = False  # the queries are the columns of the product, not the rows


class Backend(Protocol):
    """Multiplies blocks and counts. Its methods are called by several threads at a time."""

    block: int  # rows of a tile
    workers: int  # threads that work on tiles

    def ready(self) -> AbstractContextManager[None]:
        """Set up what the products need, and undo it at the end of the block."""

    def load(self, g: slice) -> Any:
        """Bring gallery items to the device, for products with several blocks of queries."""

    def products(self, q: slice, g: slice, items: Any) -> Iterator[tuple[slice, Any]]:
        """Multiply queries and loaded items; pairs that no query needs become -2.

        Yields runs of the queries, usually one, with their product as `Tile` has it. A
        product lasts until the same thread requests the next one.
        """

    def count(self, tile: Tile) -> np.ndarray:
        """Count the items that reach the thresholds of each query.

        Returns (4, n) integers: cos sure, cos possible, l2 sure, l2 possible.
        """

    def doubtful(
        self, tile: Tile, distance: str, queries: np.ndarray, tied: np.ndarray, pairs: np.ndarray
    ) -> int:
        """List the negatives that possibly, but not surely, reach the thresholds of some queries.

        A negative in the group that ties with the nearest positive is added to `tied` (n,) instead.
        Returns the number of rows (query, item) of the tile written to `pairs`, -1 if they do not
        fit.
        """

    def credit(self, tile: Tile, counted: Counted, pairs: np.ndarray) -> Iterator[int]:
        """Keep the tile's negatives that may stand before a positive within R, or add them to it.

        `counted` is that of the tile's queries. Yields how many rows (query of the tile, gallery
        row, and the range of positives in doubt) `pairs` holds; the caller copies them before it
        continues.
        """
