"""Neighbour lists by FAISS, and the exact places of the right items that follow from them.

Both distances become one: the squared Euclidean distance between rows that are unit vectors for
cos and the raw rows, times a power of two, for l2. Distances survive a shift, so FAISS sees the
rows relative to the gallery's mean: float32 then spends its digits on what differs. Its lists are
candidates only; `right_positions` and `recall_ranks` score them again in float64, prove each list
long enough or search further, and so equal a float64 brute force in which a tie never helps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from numba import njit

from retrieval.duplicates import row_groups
from retrieval.errors import DmlError
from retrieval.metrics import RightPositions

Progress = Callable[[int, int], None]
Rows = slice | np.ndarray

MEMORY = 2 << 30
PAD = 8  # neighbours listed beyond those needed: room between the last needed and the last listed
GPU_MOST = 2048  # the longest list that FAISS returns on a GPU
TIE = 1e-12  # distances this close, relative to themselves, are equal ...
UNIT_TIE = 1e-14  # ... and chords of unit vectors this close: normalising rounds
SEARCH_WORK = 1 << 35  # multiplications per FAISS call, about a second: Ctrl-C waits no longer


def search(
    queries: np.ndarray,
    gallery: np.ndarray,
    k: int,
    distance: str,
    *,
    self_ids: np.ndarray | None = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest gallery rows of each query: ids (Q, k) int64, scores (Q, k) float32.

    Scores are cosines (descending) or squared distances (ascending); beyond the range of float32
    a squared distance becomes inf or 0, the order stands. `self_ids` (Q,) names the gallery row
    that is the query itself (-1: none); it is left out by that id. Where the gallery ends before k,
    ids are -1 and scores -inf or inf.
    """
    space = _space(queries, gallery, distance, memory)
    Q = len(queries)
    ids, found = np.full((Q, k), -1, np.int64), np.full((Q, k), np.inf, np.float32)
    resident = _resident(space, gallery, memory)
    tick = _ticker(progress, Q, len(gallery))
    for part in _blocks(Q, max(1, memory // 8 // max(4 * space.width, 48 * (k + 1)))):
        selfs = None if self_ids is None else np.asarray(self_ids)[part]
        scores, listed = _lists(space, queries, part, gallery, resident, k, selfs, memory, tick)
        ids[part, : listed.shape[1]], found[part, : listed.shape[1]] = listed, scores
    if distance == "cos":
        return ids, 1 - found / 2  # |u - v|^2 = 2 - 2 cos
    with np.errstate(over="ignore", under="ignore"):
        return ids, (found.astype(np.float64) / space.scale / space.scale).astype(np.float32)


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


def single_precision(
    vectors: np.ndarray, distance: str, memory: int = MEMORY
) -> tuple[np.ndarray, float]:
    """All rows (N, D) as float32 about their mean, and the factor they were multiplied by.

    For what only squared distances matter to. cos: rows of length 1, zero rows at the origin.
    """
    space = _space(vectors, vectors, distance, memory)
    if space.apart:
        space = _Space("cos", 1.0, False, space.centre[:-2])
    return _float32(space, vectors, slice(None), False, memory), space.scale


# --- the space in which both distances are squared Euclidean ---


@dataclass(frozen=True)
class _Space:
    distance: str
    scale: float  # l2: a power of two, exact, that keeps squares within float32
    apart: bool  # cos: there are zero rows; cosine 0 with all puts each side on an axis of its own
    centre: np.ndarray  # (D',) mean of the gallery, float64

    @property
    def width(self) -> int:
        return len(self.centre)


def _space(queries: np.ndarray, gallery: np.ndarray, distance: str, memory: int) -> _Space:
    if distance not in ("cos", "l2"):
        raise DmlError(f'Unknown distance "{distance}".', "Known: cos, l2.")
    sides = [gallery] if queries is gallery else [gallery, queries]
    total, top, apart = np.zeros(gallery.shape[1]), 0.0, False
    for side in sides:
        for part in _blocks(len(side), _chunk(gallery.shape[1], memory)):
            x = np.asarray(side[part], dtype=np.float64)
            size = float(max(x.max(initial=0.0), -x.min(initial=0.0)))
            if not np.isfinite(size):
                raise DmlError(
                    "The embeddings contain NaN or infinite values.",
                    "They have no distance to anything.",
                    "Export them again, or drop those rows.",
                )
            top = max(top, size)
            if distance == "cos":
                apart |= not x.any(axis=1).all()
            if side is gallery:
                total += (_unit(x) if distance == "cos" else x).sum(axis=0)
    centre = total / max(1, len(gallery))
    if distance == "cos":
        return _Space("cos", 1.0, apart, np.append(centre, [0.0, 0.0]) if apart else centre)
    scale = 2.0 ** -int(np.clip(np.frexp(top)[1], -1000, 1000))
    return _Space("l2", scale, False, centre * scale)


def _unit(x: np.ndarray) -> np.ndarray:
    norm = np.sqrt(np.einsum("ij,ij->i", x, x))
    return x / np.where(norm > 0, norm, 1.0)[:, None]


def _exact(space: _Space, vectors: np.ndarray, rows: Rows, asks: bool) -> np.ndarray:
    """float64 rows (n, D') whose squared distances are the scores."""
    x = np.asarray(vectors[rows], dtype=np.float64)
    if space.distance == "l2":
        return x * space.scale
    unit = _unit(x)
    if space.apart:
        unit = np.pad(unit, ((0, 0), (0, 2)))
        unit[~x.any(axis=1), -1 if asks else -2] = 1.0
    return unit


def _float64(
    space: _Space, vectors: np.ndarray, rows: np.ndarray, asks: bool, memory: int
) -> np.ndarray:
    """`_exact` chunk by chunk: temporaries stay in the cache, and small."""
    out = np.empty((len(rows), space.width))

    def fill(part: slice) -> None:
        out[part] = _exact(space, vectors, rows[part], asks)

    _each(fill, _blocks(len(rows), _chunk(space.width, memory)))
    return out


def _float32(space: _Space, vectors: np.ndarray, rows: Rows, asks: bool, memory: int) -> np.ndarray:
    """The rows relative to the centre (n, D'), for FAISS."""
    ids = np.arange(len(vectors))[rows]
    out = np.empty((len(ids), space.width), np.float32)

    def fill(part: slice) -> None:
        # A slice reads a memory map in order; an index array would copy first.
        inner = slice(ids[part][0], ids[part][-1] + 1) if isinstance(rows, slice) else ids[part]
        out[part] = _exact(space, vectors, inner, asks) - space.centre

    _each(fill, _blocks(len(ids), _chunk(space.width, memory)))
    return out


def _each(work: Callable[[slice], None], parts: Iterable[slice]) -> None:
    """Runs work on every part, in threads: NumPy and the kernels below free the GIL."""
    parts = list(parts)
    if len(parts) < 2:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        list(pool.map(work, parts))


def _blocks(n: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _chunk(width: int, memory: int) -> int:
    """Rows of float64 to convert at a time: small enough for the cache to help."""
    return max(16, min(memory // 64, 4 << 20) // (8 * max(1, width)))


# --- FAISS: lists of candidates ---


def load_faiss() -> ModuleType:
    """The module, or an error that names what to install."""
    try:
        import faiss
    except ImportError as error:
        raise DmlError(
            "FAISS is not installed.",
            "Neighbour lists and k-means need it.",
            'pip install "dmltool[cpu]", or "dmltool[gpu]" beside a CUDA device.',
        ) from error
    return faiss


@cache
def _gpu_resources() -> object:
    return load_faiss().StandardGpuResources()


def _knn(queries: np.ndarray, gallery: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    faiss = load_faiss()
    gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    if gpus > 0 and k <= GPU_MOST and hasattr(faiss, "knn_gpu"):
        return faiss.knn_gpu(_gpu_resources(), queries, gallery, k)
    return faiss.knn(queries, gallery, k)


def _resident(space: _Space, gallery: np.ndarray, memory: int) -> np.ndarray | None:
    """The whole gallery in float32 if a quarter of the memory holds it, else None."""
    if len(gallery) * space.width * 4 > memory // 4:
        return None
    return _float32(space, gallery, slice(None), False, memory)


def _lists(
    space: _Space,
    queries: np.ndarray,
    asking: Rows,
    gallery: np.ndarray,
    resident: np.ndarray | None,
    k: int,
    selfs: np.ndarray | None,
    memory: int,
    tick: Callable[[int], None],
) -> tuple[np.ndarray, np.ndarray]:
    """float32 scores and ids (n, min(k, G)), ascending; the query itself left out."""
    G = len(gallery)
    rows = _float32(space, queries, asking, True, memory)  # (n, D')
    keep = min(G, k + (selfs is not None))
    scores = np.full((len(rows), keep), np.inf, np.float32)
    ids = np.full((len(rows), keep), -1, np.int64)
    for block in _blocks(G, max(1, memory // 4 // (4 * space.width))):
        items = resident
        if items is None:
            items = _float32(space, gallery, block, False, memory)
        n = len(items)
        for part in _blocks(len(rows), min(4096, max(64, SEARCH_WORK // (n * space.width)))):
            near, listed = _knn(rows[part], items, min(keep, n))
            if n == G:
                scores[part], ids[part] = near, listed
            else:
                _merge(scores[part], ids[part], near, listed + block.start)
            tick((part.stop - part.start) * n)
    return (scores, ids) if selfs is None else _without(scores, ids, selfs, k)


def _merge(scores: np.ndarray, ids: np.ndarray, near: np.ndarray, listed: np.ndarray) -> None:
    """Keeps the best of both lists, in place."""
    both, names = np.hstack([scores, near]), np.hstack([ids, listed])
    best = np.argsort(both, axis=1, kind="stable")[:, : scores.shape[1]]
    scores[:] = np.take_along_axis(both, best, axis=1)
    ids[:] = np.take_along_axis(names, best, axis=1)


def _without(
    scores: np.ndarray, ids: np.ndarray, selfs: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists without each query's own id. Where it is not listed, one empty place goes instead."""
    n = len(ids)
    scores = np.hstack([scores, np.full((n, 1), np.inf, np.float32)])
    ids = np.hstack([ids, np.full((n, 1), -1, np.int64)])
    drop = (ids == selfs[:, None]) & (ids >= 0)
    drop[:, -1] = ~drop.any(axis=1)
    return scores[~drop].reshape(n, -1)[:, :k], ids[~drop].reshape(n, -1)[:, :k]


def _ticker(progress: Progress | None, Q: int, G: int) -> Callable[[int], None]:
    """Turns pairs scored into queries done."""
    pairs = 0

    def tick(more: int) -> None:
        nonlocal pairs
        pairs += more
        if progress is not None:
            progress(min(Q, pairs // max(1, G)), Q)

    return tick


# --- float64: the places of right items ---


@dataclass(frozen=True)
class _Task:
    space: _Space
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
    space = _space(queries, gallery, distance, memory)
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
    resident = _resident(task.space, task.gallery, task.memory)
    pending = np.flatnonzero(depth > 0)
    for stretch in (1, 4):
        ticking = _ticker(progress if stretch == 1 else None, Q, G)
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
    single, ids = _lists(
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


def _tied(squared: np.ndarray, space: _Space) -> np.ndarray:
    """The largest squared distance that still counts as equal."""
    slack = UNIT_TIE if space.distance == "cos" else 0.0
    return (np.sqrt(squared) * (1 + TIE / 2) + slack) ** 2


def _keys(scores: np.ndarray, right: np.ndarray, space: _Space) -> np.ndarray:
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
    for part in _blocks(n, max(1, step)):
        used = np.unique(ids[part])
        used = used[used >= 0]
        place = np.searchsorted(used, ids[part])
        place[ids[part] < 0] = -1
        ask = _float64(task.space, task.queries, asking[part], True, task.memory)
        items = _float64(task.space, task.gallery, used, False, task.memory)
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
    for part in _blocks(len(pending), step):
        asking = pending[part]
        ask = _float64(task.space, task.queries, asking, True, task.memory)
        scores = np.empty((len(asking), len(distinct)))
        for block in _blocks(len(distinct), items):
            rows = _float64(task.space, task.gallery, distinct[block], False, task.memory)
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
    step = -(-n // (os.cpu_count() or 1))
    _each(lambda part: kernel(*(a[part] for a in sliced), shared), _blocks(n, max(1, step)))


# Sums may be reassociated: that lets them use vector registers, and TIE covers the difference.
_compiled = njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})


@_compiled
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


@_compiled
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
