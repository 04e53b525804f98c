"""Nearest positives and negatives of queries by exact search in blocks.

One service for the report, for files that list neighbours and for the parity check of an export.
Of items at the same distance, the one that comes first in the gallery is listed first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from retrieval.distances import Space, row_scores, space_of
from retrieval.problem import Problem
from retrieval.ranking.backends.choice import choose
from retrieval.resources import Progress, compiled, processors, run_all, single_blas_thread, slices

MEMORY = 256 << 20  # bytes for gallery points
ROWS, COLUMNS = 512, 2048  # of a tile
SAMPLE = 1000  # rows whose median is the centre for l2
POSITIVE, NEGATIVE = 0, 1


class Neighbours(NamedTuple):
    """Lists of k neighbours of each query, nearest first; [:, POSITIVE] and [:, NEGATIVE]."""

    ids: np.ndarray  # (Q, 2, k) int64 gallery index, -1 where there are fewer
    squared: np.ndarray  # (Q, 2, k) squared distances in `space`, inf where there are fewer
    space: Space


class Best(NamedTuple):
    """The nearest negative of each query, computed in float32, which cannot decide ties."""

    negative: np.ndarray  # (Q,) int64 gallery index, -1: none
    margin: np.ndarray  # (Q,) float32, to any scale: how much nearer the positive is; -inf, inf


def nearest(
    problem: Problem,
    k: int,
    distance: str,
    progress: Progress | None = None,
    memory: int = MEMORY,
    device: str = "cpu",
) -> Neighbours:
    """The k nearest positives and the k nearest negatives of every query, in float64.

    memory: bytes for gallery points; it changes no list.
    device: the device that multiplies, as in `count_ranks`; another one may list another of two
    items whose distances differ by less than float64 rounds.
    """
    space = _space(problem, distance)
    chosen = choose(device, len(problem.query_codes), *problem.gallery.shape)
    multiply = _on(chosen.devices) if chosen.devices else _multiply
    _, ids = _scan(problem, space, k, np.float64, memory, progress, multiply)
    squared = np.where(ids >= 0, 0.0, np.inf)
    # By differences: what q.x - (|q|^2 + |x|^2) / 2 loses of small distances comes back.
    for part in slices(len(ids), max(1, memory // 64 // (space.width * 2 * k))):
        queries = space.points(problem.query_vectors, part, query=True)
        q, side, m = np.nonzero(ids[part] >= 0)
        gap = queries[q] - space.points(problem.gallery, ids[part][q, side, m])
        squared[part][q, side, m] = np.einsum("ij,ij->i", gap, gap)
    order = np.lexsort((ids, squared))
    ids, squared = (np.take_along_axis(a, order, axis=2) for a in (ids, squared))
    return Neighbours(ids, squared, space)


def nearest_quickly(
    problem: Problem, distance: str, progress: Progress | None = None, memory: int = MEMORY
) -> Best:
    """The nearest negative of every query, in float32."""
    space = _space(problem, distance)
    near, ids = _scan(problem, space, 1, np.float32, memory, progress)
    with np.errstate(invalid="ignore"):
        margin = near[:, POSITIVE, 0] - near[:, NEGATIVE, 0]
    return Best(ids[:, NEGATIVE, 0], np.where(ids[:, POSITIVE, 0] < 0, -np.inf, margin))


def _space(problem: Problem, distance: str) -> Space:
    """The points, about a centre that a few extreme rows do not move away from all others.

    About the mean, such rows would leave float32 no digits for the distances of the others.
    """
    space = space_of(problem.query_vectors, problem.gallery, distance)
    if distance == "cos" or not len(problem.gallery):
        return space
    some = problem.gallery[:: max(1, len(problem.gallery) // SAMPLE)].astype(np.float64)
    return replace(space, centre=np.median(some * space.scale, axis=0))


def pair_scores(
    problem: Problem, queries: np.ndarray, items: np.ndarray, distance: str
) -> np.ndarray:
    """(n,) cosine or distance of queries and gallery items, pair by pair."""
    out = np.empty(len(queries))
    for part in slices(len(queries), 4096):
        rows = problem.query_vectors[queries[part]], problem.gallery[items[part]]
        out[part] = row_scores(*rows, distance)
    return out


class Lists(NamedTuple):
    """Queries and the lists of their best items so far."""

    halves: np.ndarray  # (A,) half of the squared length of each query
    codes: np.ndarray  # (A,)
    self_ids: np.ndarray  # (A,)
    near: np.ndarray  # (A, 2, k) nearness, falling
    ids: np.ndarray  # (A, 2, k) gallery index


Multiply = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _multiply(queries: np.ndarray, items: np.ndarray) -> np.ndarray:
    return queries @ items.T


def _on(devices: tuple[str, ...]) -> Multiply:
    """Multiply float64 with torch; the devices take turns."""
    import torch

    turns = itertools.cycle(devices)

    def multiply(queries: np.ndarray, items: np.ndarray) -> np.ndarray:
        device = next(turns)
        left, right = (torch.from_numpy(each).to(device) for each in (queries, items))
        return (left @ right.T).cpu().numpy()

    return multiply


def _scan(
    problem: Problem,
    space: Space,
    k: int,
    dtype: DTypeLike,
    memory: int,
    progress: Progress | None,
    multiply: Multiply = _multiply,
) -> tuple[np.ndarray, np.ndarray]:
    """Nearness (Q, 2, k), falling, and gallery index of the best, from tiles of one product."""
    Q, G = len(problem.query_codes), len(problem.gallery)
    near: np.ndarray = np.full((Q, 2, k), -np.inf, dtype)
    ids = np.full((Q, 2, k), -1, np.int64)

    def search(items: np.ndarray, offset: np.ndarray, start: int, part: slice) -> None:
        queries = space.points(problem.query_vectors, part, query=True, dtype=dtype)
        half = np.einsum("ij,ij->i", queries, queries) / 2
        if dtype is not np.float64:  # of float32, it costs digits
            half[:] = 0
        own = problem.query_codes[part], problem.self_ids[part]
        lists = Lists(half, *own, near[part], ids[part])
        for block in slices(len(items), COLUMNS):
            product, first = multiply(queries, items[block]), start + block.start
            _keep_best(product, offset[block], problem.gallery_codes[first:], first, lists)

    for block in slices(G, max(1, memory // (np.dtype(dtype).itemsize * space.width))):
        items = space.points(problem.gallery, block, dtype=dtype)
        offset = np.einsum("ij,ij->i", items, items) / 2

        def tell(done: int, total: int, block: slice = block) -> None:
            if progress:
                here = (block.stop - block.start) * done // total
                progress(Q * (block.start + here), Q * G)

        with single_blas_thread():
            work = partial(search, items, offset, block.start)
            run_all(work, slices(Q, ROWS), processors(), tell)
    return near, ids


@compiled(fastmath=False)
def _keep_best(
    product: np.ndarray, halves: np.ndarray, codes: np.ndarray, start: int, lists: Lists
) -> None:
    """Insert the items of a tile, which are those of the gallery from `start` on, into the lists.

    halves: half of the squared length of each item.
    """
    near, ids = lists.near, lists.ids
    k = near.shape[2]
    for i in range(product.shape[0]):
        for j in range(product.shape[1]):
            value = product[i, j] - (lists.halves[i] + halves[j])
            side = 0 if codes[j] == lists.codes[i] else 1
            if value > near[i, side, k - 1] and start + j != lists.self_ids[i]:
                m = k - 1
                while m > 0 and near[i, side, m - 1] < value:
                    near[i, side, m] = near[i, side, m - 1]
                    ids[i, side, m] = ids[i, side, m - 1]
                    m -= 1
                near[i, side, m] = value
                ids[i, side, m] = start + j
