"""Ranks and the places of right items from FAISS neighbour lists: `--engine faiss`.

The lists are candidates only: they are scored again in float64, each is proven long enough or the
search goes on, and so the result equals a float64 brute force in which a tie never helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from retrieval.metrics import RightPositions
from retrieval.neighbours import lists, resident_rows, ticker
from retrieval.ranking.identical_rows import row_groups
from retrieval.ranking.kernels import compiled
from retrieval.resources import Progress, processors, slices
from retrieval.space import MEMORY, Space, each, float64_rows, space_of

PAD = 8  # neighbours listed beyond those needed: room between the last needed and the last listed
TIE = 1e-12  # distances this close, relative to themselves, are equal ...
UNIT_TIE = 1e-14  # ... and chords of unit vectors this close: normalising rounds


def right_positions(
    queries: np.ndarray,
    query_labels: np.ndarray,
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    distance: str,
    *,
    self_ids: np.ndarray | None = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> RightPositions:
    """For R-precision and MAP@R: R of each query and the places of its right items within R.

    Labels are codes from 0 that both sides share. Two distances within `TIE` are equal, and the
    wrong item of two equals comes first.
    """
    task = _task(queries, query_labels, gallery, gallery_labels, distance, self_ids, memory)
    owners, places = _places(task, task.rights, False, progress)
    order = np.argsort(owners, kind="stable")
    lengths = np.bincount(owners, minlength=len(task.rights))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return RightPositions(task.rights, offsets, places[order])


def recall_ranks(
    queries: np.ndarray,
    query_labels: np.ndarray,
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    k: int,
    distance: str,
    *,
    self_ids: np.ndarray | None = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> np.ndarray:
    """Ranks (Q,) as `metrics` wants them, told apart up to k: k + 1 stands for all beyond.

    0 for a query without a right item. Ties as in `right_positions`.
    """
    task = _task(queries, query_labels, gallery, gallery_labels, distance, self_ids, memory)
    depth = np.where(task.rights > 0, k, 0)
    owners, places = _places(task, depth, True, progress)
    ranks = np.where(task.rights > 0, k + 1, 0)
    np.minimum.at(ranks, owners, places)
    return ranks


@dataclass(frozen=True)
class _Task:
    space: Space
    queries: np.ndarray
    query_labels: np.ndarray
    gallery: np.ndarray
    gallery_labels: np.ndarray
    selfs: np.ndarray | None  # (Q,) gallery id of the query itself, -1 for none
    rights: np.ndarray  # (Q,) right items in the gallery
    memory: int


def _task(
    queries: np.ndarray,
    query_labels: np.ndarray,
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    distance: str,
    self_ids: np.ndarray | None,
    memory: int,
) -> _Task:
    space = space_of(queries, gallery, distance, memory)
    query_labels, gallery_labels = np.asarray(query_labels), np.asarray(gallery_labels)
    top = int(query_labels.max(initial=0))
    rights = np.bincount(gallery_labels, minlength=top + 1)[query_labels].astype(np.int64)
    selfs = None if self_ids is None else np.asarray(self_ids, dtype=np.int64)
    if selfs is not None and len(gallery):
        rights -= (selfs >= 0) & (gallery_labels[selfs] == query_labels)
    return _Task(space, queries, query_labels, gallery, gallery_labels, selfs, rights, memory)


def _places(
    task: _Task, depth: np.ndarray, first: bool, progress: Progress | None
) -> tuple[np.ndarray, np.ndarray]:
    """Owners and positions of right items that stand within depth (Q,), ascending per owner.

    first: only the nearest right item matters, which a shorter list can prove.
    """
    G, Q = len(task.gallery), len(depth)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    resident = resident_rows(task.space, task.gallery, task.memory)
    pending = np.flatnonzero(depth > 0)
    for stretch in (1, 4):
        ticking = ticker(progress if stretch == 1 else None, Q, G)
        open_queries = []
        for ids, k in _groups(task, pending, depth, stretch):
            if 2 * k >= G:
                open_queries.append(ids)
                continue
            owners, places, proven = _listed_places(
                task, ids, k, depth[ids], first, resident, ticking
            )
            sure = proven[owners]
            found.append((ids[owners[sure]], places[sure]))
            open_queries.append(ids[~proven])
        pending = np.concatenate([*open_queries, np.empty(0, np.int64)]).astype(np.int64)
    found += _brute_places(task, pending, depth)
    if progress is not None:
        progress(Q, Q)
    owners = [part[0] for part in found] + [np.empty(0, np.int64)]
    places = [part[1] for part in found] + [np.empty(0, np.int64)]
    return np.concatenate(owners), np.concatenate(places)


def _groups(
    task: _Task, pending: np.ndarray, depth: np.ndarray, stretch: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Queries of similar depth and the length of their lists: a large class costs only itself."""
    # Within one depth, classes stay together: they share candidates.
    pending = pending[np.lexsort((task.query_labels[pending], depth[pending]))]
    sizes = depth[pending]
    start = 0
    while start < len(pending):
        stop = int(np.searchsorted(sizes, sizes[start] + sizes[start] // 2 + PAD, "right"))
        k = stretch * (int(sizes[stop - 1]) + 1 + PAD)
        # Half of an eighth each: float32 queries, and about 64 bytes per listed neighbour.
        rows = max(1, task.memory // 8 // max(4 * task.space.width, 64 * k))
        stop = min(stop, start + rows)
        yield pending[start:stop], k
        start = stop


def _listed_places(
    task: _Task,
    asking: np.ndarray,
    k: int,
    depth: np.ndarray,
    first: bool,
    resident: np.ndarray | None,
    tick: Callable[[int], None],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Owners (numbers within `asking`) and positions from lists of k, and whose list is proven."""
    selfs = None if task.selfs is None else task.selfs[asking]
    single, ids = lists(
        task.space, task.queries, asking, task.gallery, resident, k, selfs, task.memory, tick
    )
    scores, norms = _rescored(task, asking, ids)  # (n, k), (n,)
    right = (task.gallery_labels[ids] == task.query_labels[asking, None]) & (ids >= 0)
    key, right = _ordered(_keys(scores, right, task.space), right)
    hit = right & (np.arange(key.shape[1]) < depth[:, None])
    last = np.minimum(depth, key.shape[1]) - 1
    if first:
        last = np.where(hit.any(axis=1), hit.argmax(axis=1), last)
    # Were an item nearer than `needed` not listed, FAISS would have scored it below `limit`
    # (it is no longer than |query| + its distance). So the lists that end above are complete.
    needed = _tied(key[np.arange(len(key)), last], task.space)
    proven = single[:, -1] > needed + _margin(needed, norms, task.space.width)
    owners, columns = np.nonzero(hit)
    return owners, columns + 1, proven


def _margin(squared: np.ndarray, norms: np.ndarray, width: int) -> np.ndarray:
    """How far a float32 score may be off: |q|^2 + |x|^2 - 2 q.x in any order of summation."""
    unit = (width + 8) * 2.0**-24
    floor = width * 1e-36  # products below the range of float32 vanish
    return unit / (1 - unit) * (2 * norms + np.sqrt(squared)) ** 2 + floor


def _tied(squared: np.ndarray, space: Space) -> np.ndarray:
    """The largest squared distance that still counts as equal."""
    slack = UNIT_TIE if space.distance == "cos" else 0.0
    return (np.sqrt(squared) * (1 + TIE / 2) + slack) ** 2


def _keys(scores: np.ndarray, right: np.ndarray, space: Space) -> np.ndarray:
    """Sort keys that put a right item behind all wrong ones that are as near."""
    key = scores.copy()
    key[right] = np.nextafter(_tied(scores[right], space), np.inf)  # few are right
    return key


def _ordered(key: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(key, axis=1, kind="stable")
    return np.take_along_axis(key, order, axis=1), np.take_along_axis(right, order, axis=1)


def _rescored(task: _Task, asking: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 scores (n, k) of the listed ids, inf for -1, and norms (n,) about the centre."""
    n, k = ids.shape
    scores, norms = np.empty((n, k)), np.empty(n)
    rows = max(1, task.memory // 4 // (8 * task.space.width))
    step = min(rows // 2 + 1, n if len(task.gallery) <= rows else max(1, rows // k))
    for part in slices(n, max(1, step)):
        used = np.unique(ids[part])
        used = used[used >= 0]
        place = np.searchsorted(used, ids[part])
        place[ids[part] < 0] = -1
        ask = float64_rows(task.space, task.queries, asking[part], True, task.memory)
        items = float64_rows(task.space, task.gallery, used, False, task.memory)
        _threaded(_score_listed, part.stop - part.start, ask, place, scores[part], items)
        ask -= task.space.centre
        norms[part] = np.sqrt(np.einsum("ij,ij->i", ask, ask))
    return scores, norms


def _brute_places(
    task: _Task, pending: np.ndarray, depth: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """As `_listed_places`, from all float64 distances, each distinct gallery row scored once."""
    if not len(pending):
        return []
    G = len(task.gallery)
    # Collapsed and duplicated embeddings are what brings a gallery here.
    distinct, copy_of = np.unique(row_groups(task.gallery), return_inverse=True)
    items = max(1, task.memory // 4 // (8 * task.space.width))
    step = max(1, task.memory // 8 // max(32 * G, 8 * task.space.width))
    found = []
    for part in slices(len(pending), step):
        asking = pending[part]
        ask = float64_rows(task.space, task.queries, asking, True, task.memory)
        scores = np.empty((len(asking), len(distinct)))
        for block in slices(len(distinct), items):
            rows = float64_rows(task.space, task.gallery, distinct[block], False, task.memory)
            _threaded(_score_all, len(asking), ask, scores[:, block], rows)
        scores = scores[:, copy_of]  # (n, G)
        right = task.gallery_labels[None, :] == task.query_labels[asking, None]
        if task.selfs is not None:
            own = np.flatnonzero(task.selfs[asking] >= 0)
            scores[own, task.selfs[asking][own]] = np.inf
            right[own, task.selfs[asking][own]] = False
        key = _keys(scores, right, task.space)
        most = min(int(depth[asking].max()), G)
        if most < G:
            near = np.argpartition(key, most, axis=1)[:, :most]
            key, right = np.take_along_axis(key, near, 1), np.take_along_axis(right, near, 1)
        key, right = _ordered(key, right)
        owners, columns = np.nonzero(right & (np.arange(key.shape[1]) < depth[asking, None]))
        found.append((asking[owners], columns + 1))
    return found


def _threaded(kernel: Callable[..., None], n: int, *arrays: np.ndarray) -> None:
    """Runs kernel(*arrays) on row slices of all but the last array."""
    *sliced, shared = arrays
    step = -(-n // processors())
    each(lambda part: kernel(*(a[part] for a in sliced), shared), slices(n, max(1, step)))


# Sums may be reassociated: that lets them use vector registers, and TIE covers the difference.


@compiled
def _score_listed(queries, place, scores, items):
    """scores[i, j] = |queries[i] - items[place[i, j]]|^2."""
    for i in range(place.shape[0]):
        query = queries[i]
        for j in range(place.shape[1]):
            if place[i, j] < 0:
                scores[i, j] = np.inf
                continue
            item = items[place[i, j]]
            total = 0.0
            for d in range(queries.shape[1]):
                gap = query[d] - item[d]
                total += gap * gap
            scores[i, j] = total


@compiled
def _score_all(queries, scores, items):
    """scores[i, j] = |queries[i] - items[j]|^2."""
    for j in range(items.shape[0]):
        item = items[j]
        for i in range(queries.shape[0]):
            query = queries[i]
            total = 0.0
            for d in range(queries.shape[1]):
                gap = query[d] - item[d]
                total += gap * gap
            scores[i, j] = total
