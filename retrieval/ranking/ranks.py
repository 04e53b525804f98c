"""The exact rank of every query's nearest positive, by counting instead of sorting.

rank = 1 + the number of negatives at least as near as the nearest positive; a tie never helps.
1. The nearest positive, within classes, in float64 (`nearest_positive`).
2. Tiles of one float32 product of unit vectors (`tiles`). With s = cos(q, x) it decides both
   distances: cos by s itself, l2 because |q - x|^2 <= T  <=>  2 |q| |x| s >= |x|^2 - (T - |q|^2).
   Each verdict has a margin that covers every rounding error; what lies outside is counted.
   Pairs that the leading principal axes rule out are skipped (`principal_axes`).
3. What lies inside is decided pair by pair in float64 (`pair_distance`), and what float64 cannot
   tell apart in exact arithmetic. Tiles with too many open pairs (collapsed embeddings) first go
   through a float64 product of centred vectors.
So the ranks are those of real arithmetic, whatever the block size, thread count or row order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from retrieval.distances import DISTANCES
from retrieval.distributed.world import ALONE, World
from retrieval.metrics import PositivePositions, recall_at
from retrieval.problem import Problem
from retrieval.ranking.backends.choice import choose
from retrieval.ranking.positions import memory_of
from retrieval.ranking.sorted_rows import sorted_positions, sorting_pays
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import prepare
from retrieval.resources import Progress, single_blas_thread


@dataclass(frozen=True)
class Ranks:
    """The rank of each query's nearest positive, and what else was counted."""

    rank: np.ndarray  # (Q,) int64, 0: no positive in the gallery
    ties: np.ndarray  # (Q,) int64, negatives exactly as near as the nearest positive
    nearest: np.ndarray  # (Q,) int64, gallery index of the nearest positive, -1 if there is none
    positions: PositivePositions | None = None  # of all positives within R


@dataclass(frozen=True)
class Counting:
    """How ranks are counted."""

    distances: tuple[str, ...] = DISTANCES
    positions: bool = False
    """Find the positions of all positives as well, for R-precision and MAP@R."""
    memory: int = 2 << 30
    """Bytes to work with, beyond the vectors themselves."""
    threads: int | None = None
    """None: one for each processor."""
    block: int | None = None
    """Rows of a tile."""
    axes: int | None = None
    """How many principal axes to multiply before pairs are skipped (`principal_axes`); 0 skips
    none, and without it a sample of the pairs decides."""
    sort: bool | None = None
    """Find positions by sorting all items (`sorted_rows`) rather than by counting; None: what takes
    less time for the class of each query."""
    devices: tuple[str, ...] = ()
    """Names of torch; none: NumPy on the CPU."""
    world: World = ALONE
    """The processes that share the work; all of them count the same problem, and get its ranks."""


def count_ranks(
    problem: Problem, *, device: str = "cpu", progress: Progress | None = None, **options: Any
) -> dict[str, Ranks]:
    """Rank the queries of a problem, for each distance.

    Parameters
    ----------
    problem : queries, gallery and their classes; vectors must be finite
    device : auto, cpu, cuda for all GPUs, or one of them such as cuda:1
    progress : called with (done, total)
    options : fields of `Counting`: distances, positions, memory, threads, ...
    """
    chosen = choose(device, len(problem.query_codes), *problem.gallery.shape)
    return _ranked(problem, Counting(devices=chosen.devices, **options), progress)


def recall_at_1(problem: Problem, **options: Any) -> dict[str, float]:
    """Recall@1 by distance; the options are those of `count_ranks`."""
    ranks = count_ranks(problem, **options)
    return {d: recall_at(found.rank, [1])[1] for d, found in ranks.items()}


def _ranked(problem: Problem, how: Counting, progress: Progress | None = None) -> dict[str, Ranks]:
    if how.positions:
        Q = len(problem.query_codes)
        large = sorting_pays(problem) if how.sort is None else np.full(Q, how.sort)
        if large.any():
            return _partly_sorted(problem, large, how, progress)
        # Without runs, one half of the product serves both sides of leave-one-out.
        share = 2 if problem.queries is None else 4
        if memory_of(problem.positive_counts).sum() > how.memory // share:
            runs = _runs(problem.positive_counts, how.memory // 8)
            if len(runs) > 1:
                return _in_runs(problem, runs, how, progress)
    counter = _counted(problem, how, progress)
    return {d: _ranks(counter, d) for d in how.distances}


def _counted(problem: Problem, how: Counting, progress: Progress | None) -> TileCounter:
    """Count all tiles of a problem."""
    with single_blas_thread():  # the threads share out the work, not the BLAS
        threads = how.threads or how.world.processors
        counter = TileCounter(
            prepare(problem, how.distances, how.memory, threads),
            how.positions,
            block=how.block,
            axes=how.axes,
            devices=how.devices,
            world=how.world,
        )
        counter.count(progress)
    return counter


def _ranks(counter: TileCounter, d: str) -> Ranks:
    nearest = counter.nearest[d].index
    rank = np.where(nearest >= 0, counter.counts[d] + 1, 0)
    positions = counter.positions[d].result() if counter.positions else None
    return Ranks(rank, counter.ties[d], nearest, positions)


def _runs(positive_counts: np.ndarray, memory: int) -> list[np.ndarray]:
    """Runs of queries whose positives fit the memory."""
    run = np.cumsum(memory_of(positive_counts)) // max(1, memory)
    return np.split(np.arange(len(run)), np.flatnonzero(np.diff(run)) + 1)


def _in_runs(
    problem: Problem, runs: list[np.ndarray], how: Counting, progress: Progress | None
) -> dict[str, Ranks]:
    """Rank the queries run by run: classes of thousands have millions of positives."""
    found = []
    for n, run in enumerate(runs):
        tell = progress and partial(_tell, progress, n, len(runs))
        found.append(_ranked(problem.select(run), replace(how, sort=False), tell))
    return {d: _joined([part[d] for part in found]) for d in found[0]}


def _tell(progress: Progress, run: int, runs: int, done: int, total: int) -> None:
    progress(run * total + done, runs * total)


def _joined(parts: list[Ranks]) -> Ranks:
    rank, ties, nearest = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("rank", "ties", "nearest")
    )
    lists = [part.positions for part in parts if part.positions is not None]
    lengths = np.concatenate([np.diff(part.offsets) for part in lists])
    counts, positions = (
        np.concatenate([getattr(part, name) for part in lists]) for name in ("counts", "positions")
    )
    offsets = np.r_[0, np.cumsum(lengths)]
    return Ranks(rank, ties, nearest, PositivePositions(counts, offsets, positions))


def _partly_sorted(
    problem: Problem, large: np.ndarray, how: Counting, progress: Progress | None
) -> dict[str, Ranks]:
    """Rank all queries; find positions by sorting for those of large classes, else by counting."""
    if not large.all():
        some, others = np.flatnonzero(large), np.flatnonzero(~large)
        parts = [
            _ranked(problem.select(rows), replace(how, sort=sort), tell)
            for rows, tell, sort in ((some, progress, True), (others, None, False))
        ]
        back = np.argsort(np.r_[some, others])
        return {d: _taken(_joined([part[d] for part in parts]), back) for d in parts[0]}
    counter = _counted(problem, replace(how, positions=False), progress)
    with single_blas_thread():
        found, undecided = sorted_positions(counter.prepared, counter.world)
    if undecided.any():
        rows = np.flatnonzero(undecided)
        exact = _ranked(problem.select(rows), replace(how, sort=False))
        for d, lists in found.items():
            for n, part in zip(rows, _lists(exact[d]), strict=True):
                lists[n] = part
    return {
        d: replace(_ranks(counter, d), positions=_positions(problem.positive_counts, lists))
        for d, lists in found.items()
    }


def _positions(counts: np.ndarray, lists: list[np.ndarray]) -> PositivePositions:
    offsets = np.r_[0, np.cumsum([len(part) for part in lists])]
    positions = np.concatenate([*lists, np.empty(0, np.int64)], dtype=np.int64)
    return PositivePositions(counts, offsets, positions)


def _lists(ranks: Ranks) -> list[np.ndarray]:
    """The positions of each query."""
    assert ranks.positions is not None
    return np.split(ranks.positions.positions, ranks.positions.offsets[1:-1])


def _taken(ranks: Ranks, order: np.ndarray) -> Ranks:
    """The same for the queries `order`."""
    assert ranks.positions is not None
    lists = _lists(ranks)
    positions = _positions(ranks.positions.counts[order], [lists[n] for n in order])
    return Ranks(ranks.rank[order], ranks.ties[order], ranks.nearest[order], positions)
