"""Neighbour lists by FAISS: exact flat search in blocks, on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np

from retrieval.errors import DmlError, install
from retrieval.resources import Progress, slices
from retrieval.space import MEMORY, Rows, Space, float32_rows, space_of

GPU_MOST = 2048  # the longest list that FAISS returns on a GPU
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
    space = space_of(queries, gallery, distance, memory)
    Q = len(queries)
    ids, found = np.full((Q, k), -1, np.int64), np.full((Q, k), np.inf, np.float32)
    resident = resident_rows(space, gallery, memory)
    tick = ticker(progress, Q, len(gallery))
    for part in slices(Q, max(1, memory // 8 // max(4 * space.width, 48 * (k + 1)))):
        selfs = None if self_ids is None else np.asarray(self_ids)[part]
        scores, listed = lists(space, queries, part, gallery, resident, k, selfs, memory, tick)
        ids[part, : listed.shape[1]], found[part, : listed.shape[1]] = listed, scores
    if distance == "cos":
        return ids, 1 - found / 2  # |u - v|^2 = 2 - 2 cos
    with np.errstate(over="ignore", under="ignore"):
        return ids, (found.astype(np.float64) / space.scale / space.scale).astype(np.float32)


def load_faiss() -> ModuleType:
    """The module, or an error that names what to install."""
    try:
        import faiss
    except ImportError as error:
        raise DmlError(
            "FAISS is not installed.",
            "Neighbour lists and k-means need it.",
            install("cpu"),
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


def resident_rows(space: Space, gallery: np.ndarray, memory: int) -> np.ndarray | None:
    """The whole gallery in float32 if a quarter of the memory holds it, else None."""
    if len(gallery) * space.width * 4 > memory // 4:
        return None
    return float32_rows(space, gallery, slice(None), False, memory)


def lists(
    space: Space,
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
    rows = float32_rows(space, queries, asking, True, memory)  # (n, D')
    keep = min(G, k + (selfs is not None))
    scores = np.full((len(rows), keep), np.inf, np.float32)
    ids = np.full((len(rows), keep), -1, np.int64)
    for block in slices(G, max(1, memory // 4 // (4 * space.width))):
        items = resident
        if items is None:
            items = float32_rows(space, gallery, block, False, memory)
        n = len(items)
        for part in slices(len(rows), min(4096, max(64, SEARCH_WORK // (n * space.width)))):
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


def ticker(progress: Progress | None, Q: int, G: int) -> Callable[[int], None]:
    """Turns pairs scored into queries done."""
    pairs = 0

    def tick(more: int) -> None:
        nonlocal pairs
        pairs += more
        if progress is not None:
            progress(min(Q, pairs // max(1, G)), Q)

    return tick
