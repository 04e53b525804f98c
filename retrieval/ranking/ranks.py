"""The exact rank of every query's nearest right item, by counting instead of sorting.

rank = 1 + number of wrong items at least as near as the nearest right one; a tie never helps.
1. The nearest right item, within classes, in float64 (`positives`).
2. Blocks of one float32 product of unit vectors. With s = cos(q, x) it decides both distances:
   cos by s itself, l2 because |q - x|^2 <= T  <=>  2 |q| |x| s >= |x|^2 - (T - |q|^2).
   Each verdict has a margin that covers every rounding error; what lies outside is counted.
3. What lies inside is decided pair by pair in float64, and what float64 cannot tell apart in
   exact arithmetic. Tiles with too many open pairs (collapsed embeddings) first go through a
   float64 product of centred vectors.
So the ranks are those of real arithmetic, whatever the block size, thread count or row order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrieval.metrics import DISTANCES, PositivePositions
from retrieval.ranking.pair_distance import whole_multiples
from retrieval.ranking.positions import BYTES
from retrieval.ranking.tiles import Engine
from retrieval.ranking.vectors import Side
from retrieval.resources import Progress, processors, single_blas_thread


@dataclass(frozen=True)
class Ranks:
    """Per query: its rank (0: no right item in the gallery), ties and nearest right item."""

    rank: np.ndarray  # (Q,) int64
    ties: np.ndarray  # (Q,) int64, wrong items exactly as near as the nearest right one
    nearest: np.ndarray  # (Q,) int64, gallery index, -1 if there is none
    positions: PositivePositions | None = None  # of all right items, as far as they stand within R


def count_ranks(
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    queries: np.ndarray | None = None,
    query_labels: np.ndarray | None = None,
    *,
    self_ids: np.ndarray | None = None,
    distances: tuple[str, ...] = DISTANCES,
    positions: bool = False,
    memory: int = 2 << 30,
    threads: int | None = None,
    block: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Ranks]:
    """Ranks of queries (Q, D) in gallery (G, D), labels as int64 codes, for each distance.

    Without queries every gallery item asks all others. `self_ids` (Q,) names the gallery row that
    is the query itself (-1: none): it is left out by identity. Vectors must be finite. `positions`
    asks for the places of all right items as well, for R-precision and MAP@R.
    """
    threads = threads or processors()
    if positions:
        rights = _count_labels(gallery_labels, gallery_labels if queries is None else query_labels)
        if rights.sum() * BYTES > memory // 4 and len(rights) > 1:
            return _in_chunks(
                gallery, gallery_labels, queries, query_labels, rights,
                self_ids=self_ids, distances=distances, positions=True, memory=memory,
                threads=threads, block=block, progress=progress,
            )  # fmt: skip
    if queries is None:
        [gallery] = whole_multiples([gallery])
    else:
        gallery, queries = whole_multiples([gallery, queries])
    items = Side(gallery, gallery_labels, memory // 4, threads)
    asks = items if queries is None else Side(queries, query_labels, memory // 4, threads)
    if queries is None:
        self_ids = np.arange(len(items))
    elif self_ids is None:
        self_ids = np.full(len(asks), -1)
    if block is None:  # enough tiles to share out, each large enough for a product at full speed
        block = min(1024, max(256, len(items) // 16))
    with single_blas_thread():  # one tile per thread, not one product on all
        engine = Engine(
            asks, items, np.asarray(self_ids, np.int64), distances, positions, threads, block
        )
        engine.count(progress)
    return {d: _ranks(engine, d) for d in distances}


def _ranks(engine: Engine, d: str) -> Ranks:
    nearest = engine.right[d].index
    rank = np.where(nearest >= 0, engine.counts[d] + 1, 0)
    places = engine.places[d].positions() if engine.places else None
    return Ranks(rank, engine.ties[d], nearest, places)


def _count_labels(gallery_labels: np.ndarray, query_labels: np.ndarray) -> np.ndarray:
    """(Q,) how many gallery items have the query's label."""
    known, sizes = np.unique(gallery_labels, return_counts=True)
    at = np.minimum(np.searchsorted(known, query_labels), len(known) - 1)
    return np.where(known[at] == query_labels, sizes[at], 0)


def _in_chunks(
    gallery, gallery_labels, queries, query_labels, rights, *, self_ids, memory, progress, **options
) -> dict[str, Ranks]:
    """The same in runs of queries whose right items fit the memory: classes of thousands."""
    if queries is None:
        queries, query_labels, self_ids = gallery, gallery_labels, np.arange(len(gallery))
    chunk = np.cumsum(rights) * BYTES // max(1, memory // 8)
    runs = np.split(np.arange(len(rights)), np.flatnonzero(np.diff(chunk)) + 1)
    found = []
    for n, run in enumerate(runs):
        tell = progress and (lambda d, t, n=n: progress(n * t + d, len(runs) * t))
        found.append(
            count_ranks(
                gallery, gallery_labels, queries[run], query_labels[run],
                self_ids=None if self_ids is None else self_ids[run],
                memory=max(memory, 4 * int(rights[run].sum()) * BYTES), progress=tell, **options,
            )
        )  # fmt: skip
    return {d: _joined([part[d] for part in found]) for d in found[0]}


def _joined(parts: list[Ranks]) -> Ranks:
    rank, ties, nearest, counts, positions, lengths = (
        np.concatenate(arrays)
        for arrays in zip(
            *(
                (p.rank, p.ties, p.nearest, p.positions.counts, p.positions.positions,
                 np.diff(p.positions.offsets))
                for p in parts
            ),
            strict=True,
        )
    )  # fmt: skip
    places = PositivePositions(counts, np.r_[0, np.cumsum(lengths)], positions)
    return Ranks(rank, ties, nearest, places)
