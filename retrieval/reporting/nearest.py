"""Who is nearest: the best right and wrong item of every query, and the rows of a few in full."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from retrieval.compiling import compiled
from retrieval.problem import Problem
from retrieval.resources import Progress, processors, run_all, single_blas_thread, slices
from retrieval.space import TIE, UNIT_TIE, Space, float32_rows, float64_rows, space_of

MEMORY = 256 << 20  # bytes for gallery rows, and as much for scores
ASKING, ITEMS = 512, 2048  # rows and columns of a tile


@dataclass(frozen=True)
class Best:
    """Per query, in float32: good enough to count and to choose by, not to decide a tie."""

    right: np.ndarray  # (Q,) int64 gallery index, -1: none
    wrong: np.ndarray  # (Q,) int64
    margin: np.ndarray  # (Q,) float32, to any scale: how much nearer the right one is; -inf, inf


def best_of(
    queries: np.ndarray,
    query_codes: np.ndarray,
    gallery: np.ndarray,
    gallery_codes: np.ndarray,
    self_ids: np.ndarray,
    distance: str,
    progress: Progress | None = None,
) -> Best:
    """The nearest right and the nearest wrong item of every query; self_ids (Q,): -1 is none."""
    space = space_of(queries, gallery, distance, MEMORY)
    Q, G = len(queries), len(gallery)
    near, found = np.full((Q, 2), -np.inf, np.float32), np.full((Q, 2), -1, np.int64)
    query_codes, gallery_codes, self_ids = (
        np.asarray(column, np.int64) for column in (query_codes, gallery_codes, self_ids)
    )

    def ask(items: np.ndarray, half: np.ndarray, start: int, part: slice) -> None:
        asks = float32_rows(space, queries, part, True, MEMORY)
        for block in slices(len(items), ITEMS):
            at = slice(start + block.start, start + block.stop)
            _keep_best(
                asks @ items[block].T, half[block], query_codes[part], gallery_codes[at],
                self_ids[part], at.start, near[part], found[part],
            )  # fmt: skip

    for block in slices(G, max(1, MEMORY // (4 * space.width))):
        items = float32_rows(space, gallery, block, False, MEMORY)
        half = np.einsum("ij,ij->i", items, items) / 2
        tell = progress and partial(_tell, progress, Q * block.start, len(items), Q * G)
        tasks = [
            (partial(ask, items, half, block.start, part), part.stop - part.start)
            for part in slices(Q, ASKING)
        ]
        with single_blas_thread():
            run_all(tasks, processors(), tell)
    with np.errstate(invalid="ignore"):
        margin = near[:, 0] - near[:, 1]
    return Best(found[:, 0], found[:, 1], np.where(found[:, 0] < 0, -np.inf, margin))


def _tell(progress: Progress, before: int, items: int, total: int, done: int, _: int) -> None:
    progress(before + done * items, total)


@compiled
def _keep_best(product, half, asks, codes, selfs, start, near, found):
    """Nearness is q.x - |x|^2 / 2; column 0 of near and found is for right items, 1 for wrong."""
    for i in range(product.shape[0]):
        for j in range(product.shape[1]):
            value = product[i, j] - half[j]
            side = 0 if codes[j] == asks[i] else 1
            if value > near[i, side] and start + j != selfs[i]:
                near[i, side] = value
                found[i, side] = start + j


def rows_of(
    problem: Problem,
    asking: np.ndarray,
    ranks: np.ndarray,
    distance: str,
    k: int = 8,
    progress: Progress | None = None,
) -> list[tuple[list[int], list[float]]]:
    """For each query of `asking` (n,): its k nearest gallery items, nearest first, and scores.

    A score is the cosine, or the distance. ranks (n,) are the engine's: they say where the nearest
    right item stands, so that a row never contradicts the scores, ties included.
    """
    space = space_of(problem.query_vectors, problem.gallery, distance, MEMORY)
    selfs = problem.self_ids[asking]
    codes = problem.query_codes[asking]
    asks = float64_rows(space, problem.query_vectors, asking, True, MEMORY) - space.centre
    kept = {right: _Kept(len(asking), k) for right in (True, False)}
    G = len(problem.gallery)
    for block in slices(G, max(k, min(8192, MEMORY // 8 // max(1, space.width)))):
        items = _items(space, problem, np.arange(block.start, block.stop))
        for part, squared in _squared(asks, items):
            same = problem.gallery_codes[None, block] == codes[part, None]
            inside = np.flatnonzero((selfs[part] >= block.start) & (selfs[part] < block.stop))
            squared[inside, selfs[part][inside] - block.start] = np.inf
            for right, best in kept.items():
                best.add(part, np.where(same == right, squared, np.inf), block.start)
        if progress:
            progress(block.stop, G)
    for best in kept.values():
        best.rescore(space, problem, asks)
    return [
        _score(space, *_merged(kept[True].row(n), kept[False].row(n), int(rank), k))
        for n, rank in enumerate(ranks)
    ]


def pair_scores(
    problem: Problem, asking: np.ndarray, items: np.ndarray, distance: str
) -> np.ndarray:
    """(n,) cosine or distance of queries and gallery items, pair by pair."""
    space = space_of(problem.query_vectors, problem.gallery, distance, MEMORY)
    out = np.empty(len(asking))
    for part in slices(len(asking), 4096):
        gap = float64_rows(space, problem.query_vectors, asking[part], True, MEMORY)
        gap -= float64_rows(space, problem.gallery, items[part], False, MEMORY)
        out[part] = np.einsum("ij,ij->i", gap, gap)
    return shown_score(space, out)


def shown_score(space: Space, squared: np.ndarray) -> np.ndarray:
    """Squared distances in the space as cosines, or as distances of the vectors themselves."""
    return 1 - squared / 2 if space.distance == "cos" else np.sqrt(squared) / space.scale


class _Kept:
    """The k nearest so far of each of n queries."""

    def __init__(self, n: int, k: int) -> None:
        self.squared, self.ids = np.full((n, k), np.inf), np.full((n, k), -1, np.int64)

    def add(self, part: slice, squared: np.ndarray, start: int) -> None:
        k = self.ids.shape[1]
        if squared.shape[1] > k:
            ids = np.argpartition(squared, k - 1, axis=1)[:, :k]
            squared = np.take_along_axis(squared, ids, axis=1)
        else:
            ids = np.broadcast_to(np.arange(squared.shape[1]), squared.shape)
        both = np.hstack([self.squared[part], squared])
        names = np.hstack([self.ids[part], ids + start])
        best = np.argsort(both, axis=1, kind="stable")[:, :k]
        self.squared[part] = np.take_along_axis(both, best, axis=1)
        self.ids[part] = np.take_along_axis(names, best, axis=1)

    def rescore(self, space: Space, problem: Problem, asks: np.ndarray) -> None:
        """By differences: what |q|^2 + |x|^2 - 2 q.x loses of small distances comes back."""
        known = np.isfinite(self.squared)
        for column in range(self.ids.shape[1]):
            for part in slices(len(asks), 4096):
                here = part.start + np.flatnonzero(known[part, column])
                gap = asks[here] - _items(space, problem, self.ids[here, column])
                self.squared[here, column] = np.einsum("ij,ij->i", gap, gap)
        order = np.lexsort((self.ids, self.squared))
        self.squared = np.take_along_axis(self.squared, order, axis=1)
        self.ids = np.take_along_axis(self.ids, order, axis=1)

    def row(self, n: int) -> list[tuple[float, int]]:
        known = np.isfinite(self.squared[n])
        return list(zip(self.squared[n][known].tolist(), self.ids[n][known].tolist(), strict=True))


def _items(space: Space, problem: Problem, rows: np.ndarray) -> np.ndarray:
    return float64_rows(space, problem.gallery, rows, False, MEMORY) - space.centre


def _squared(asks: np.ndarray, items: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    lengths = np.einsum("ij,ij->i", items, items)
    for part in slices(len(asks), max(1, MEMORY // 32 // max(1, len(items)))):
        own = np.einsum("ij,ij->i", asks[part], asks[part])
        yield part, own[:, None] + lengths[None] - 2 * (asks[part] @ items.T)


def _merged(
    right: list[tuple[float, int]], wrong: list[tuple[float, int]], rank: int, k: int
) -> list[tuple[float, int]]:
    """Both sorted: rank - 1 wrong items, the nearest right one, the rest with the wrong first."""
    if rank == 0:
        return wrong[:k]
    rest = [(s, 0, s, n) for s, n in wrong[rank - 1 :]]
    rest += [(_tied(s), 1, s, n) for s, n in right[1:]]
    return [*wrong[: rank - 1], *right[:1], *((s, n) for _, _, s, n in sorted(rest))][:k]


def _tied(squared: float) -> float:
    """The largest squared distance that still counts as equal."""
    return (math.sqrt(squared) * (1 + TIE / 2) + UNIT_TIE) ** 2


def _score(space: Space, *row: tuple[float, int]) -> tuple[list[int], list[float]]:
    scores = shown_score(space, np.array([squared for squared, _ in row]))
    return [item for _, item in row], scores.tolist()
