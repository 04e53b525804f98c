"""Multiply and count with torch: on GPUs, and in tests on a CPU.

The products are float32 as IEEE 754 has it, so the margins of `tiles` hold: any order of summation
is allowed, TF32 and bfloat16 are not. Comparisons are those of the compiled loops, operation by
operation. No pairs are skipped by their leading axes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from retrieval.errors import DmlError
from retrieval.ranking import kernels, position_kernels
from retrieval.ranking.backends import Tile
from retrieval.ranking.backends.products import ieee_products, multiply
from retrieval.ranking.thresholds import Thresholds
from retrieval.ranking.vectors import Prepared, Vectors
from retrieval.resources import available_memory, blocks

_WORKERS = 2  # threads per device: one decides pairs on the CPU while the other keeps the GPU busy
_PAIRS = 1 << 22  # pairs compared at a time: the results in between stay in the cache of a GPU
_LEAST, _MOST = 256, 8192  # rows of a tile
_PAIR_BYTES = 8  # of a tile's product, and of rows copied from it
_SHARE = 0.8  # of the free memory

T = TypeVar("T")


class _Place(NamedTuple):
    """What a device holds of all queries and gallery items."""

    thresholds: Tensor  # (5, Q)
    norms: Tensor  # (3, G)
    query_codes: Tensor
    gallery_codes: Tensor
    tying: dict[str, Tensor]  # (Q,)
    groups: dict[str, Tensor]  # (G,)
    queries: Tensor | None  # (Q, D) unit vectors, where they fit
    gallery: Tensor | None


class TorchBackend:
    """Products of tensors on one or several devices, which share out the tiles."""

    def __init__(
        self, prepared: Prepared, limits: Thresholds, devices: tuple[str, ...], block: int | None
    ) -> None:
        self.prepared, self.limits = prepared, limits
        self.margin = float(limits.margin)
        self.places = {torch.device(name): self._place(torch.device(name)) for name in devices}
        self.workers = _WORKERS * len(devices)
        self.block = block or self._block()
        self._turns = itertools.cycle(self.places)
        self._thread = threading.local()

    # Memory

    def _place(self, device: torch.device) -> _Place:
        prepared, limits = self.prepared, self.limits

        def put(array: np.ndarray) -> Tensor:
            return torch.tensor(np.ascontiguousarray(array), device=device)

        queries, gallery = self._kept(device)
        return _Place(
            put(limits.thresholds),
            put(limits.norms),
            put(prepared.queries.codes),
            put(prepared.gallery.codes),
            {d: put(groups) for d, groups in limits.tying.items()},
            {d: put(prepared.groups[d]) for d in limits.tying},
            queries,
            gallery,
        )

    def _kept(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The unit vectors of queries and gallery on the device, None if they do not fit."""
        queries, gallery = self.prepared.queries, self.prepared.gallery
        sides = [queries] if self.prepared.symmetric else [queries, gallery]
        if sum(side.vectors.size * 4 for side in sides) > free_memory(device) // 2:
            return None, None
        try:
            kept = [_units_on(device, side) for side in sides]
        except torch.OutOfMemoryError:  # free, but in pieces
            return None, None
        return kept[0], kept[-1]

    def _block(self) -> int:
        """Rows of a tile: as many as the memory holds, but enough tiles to share out."""
        room = _SHARE * min(free_memory(device) for device in self.places) / _WORKERS
        most = int((room / _PAIR_BYTES) ** 0.5)
        if any(place.queries is None for place in self.places.values()):  # two blocks of vectors
            most = min(most, int(room / 2 / (8 * self.prepared.gallery.dim)))
        shared = len(self.prepared.gallery) // (4 * self.workers)
        return max(_LEAST, min(most, shared, _MOST) // _LEAST * _LEAST)

    @contextmanager
    def ready(self) -> Iterator[None]:
        try:
            with ieee_products():
                yield
        except torch.OutOfMemoryError as error:  # where halving does not help
            raise _out_of_memory() from error

    # Products

    def load(self, g: slice) -> Tensor:
        device = self._device()
        kept = self.places[device].gallery
        return _units(self.prepared.gallery, g, device) if kept is None else kept[g]

    def _device(self) -> torch.device:
        """The device of this thread; the threads are dealt out to the devices in turn."""
        if not hasattr(self._thread, "device"):
            self._thread.device = next(self._turns)
        return self._thread.device

    def products(self, q: slice, g: slice, items: Tensor) -> Iterator[tuple[slice, Tensor]]:
        kept = self.places[items.device].queries
        column = self.prepared.self_columns(q, g)

        def product(part: slice) -> Tensor:
            rows = slice(q.start + part.start, q.start + part.stop)
            units = (
                _units(self.prepared.queries, rows, items.device) if kept is None else kept[rows]
            )
            found = multiply(units, items)
            own = np.flatnonzero(column[part] >= 0)
            if len(own):
                index = torch.from_numpy(np.stack([own, column[part][own]])).to(items.device)
                found[index[0], index[1]] = torch.nan
            return found

        for part, found in _chunks(len(column), len(column), product):
            yield slice(q.start + part.start, q.start + part.stop), found

    # Counting

    def count(self, tile: Tile) -> np.ndarray:
        n = tile.q.stop - tile.q.start
        counts = np.zeros((4, n), np.int64)
        everything = np.arange(n)
        for at, d in ((0, "cos"), (2, "l2")):
            if d in self.prepared.distances:
                counts[at + 1] = self._reaching(tile, d, everything, sure=False)
                some = np.flatnonzero(counts[at + 1])  # no other can be sure of one
                counts[at, some] = self._reaching(tile, d, some, sure=True)
        return counts

    def _reaching(self, tile: Tile, d: str, queries: np.ndarray, *, sure: bool) -> np.ndarray:
        """Count the items that reach the threshold of some queries."""
        axis = 0 if tile.transposed else 1

        def counted(view: _View) -> Tensor:
            return self._reached(view, d, sure).sum(axis)

        found = list(self._views(tile, d, queries, counted))
        return np.concatenate([part.cpu().numpy() for _, part in found]) if found else np.zeros(0)

    def _reached(self, view: _View, d: str, sure: bool) -> Tensor:
        """Whether the items reach the thresholds, as `kernels.doubtful` has it."""
        thresholds, norms = view.thresholds, view.norms
        if d == "cos":
            return view.product >= thresholds[0 if sure else 1]
        margin = -self.margin if sure else self.margin
        scaled = (view.product + margin).mul_(thresholds[2] * norms[0])
        return scaled >= (norms[1] - thresholds[3] if sure else norms[2] - thresholds[4])

    def doubtful(
        self, tile: Tile, distance: str, queries: np.ndarray, tied: np.ndarray, pairs: np.ndarray
    ) -> int:
        axis = 0 if tile.transposed else 1

        def doubts(view: _View) -> tuple[np.ndarray, np.ndarray]:
            doubt = self._reached(view, distance, False) & ~self._reached(view, distance, True)
            doubt &= view.query_codes != view.gallery_codes
            tie = doubt & ((view.tying == view.groups) | (view.tying == kernels.ANY))
            return tie.sum(axis).cpu().numpy(), _indices(doubt & ~tie, tile)

        found = 0
        for part, (ties, listed) in self._views(tile, distance, queries, doubts):
            tied[queries[part]] += ties
            if found + len(listed) > len(pairs):
                return -1
            listed[:, 0] = queries[part][listed[:, 0]]
            pairs[found : found + len(listed)] = listed
            found += len(listed)
        return found

    def credit(
        self, tile: Tile, counted: position_kernels.Counted, pairs: np.ndarray
    ) -> Iterator[int]:
        """Find the pairs that reach a query's last positive within R; the CPU keeps them."""
        limits, l2, lists = self.limits, counted.l2, counted.lists
        distance = "l2" if l2 else "cos"
        last = torch.from_numpy(np.ascontiguousarray(lists.last)).to(tile.product.device)
        queries, gallery = limits.of_tile(distance, tile.q, tile.g)

        def candidates(view: _View) -> tuple[np.ndarray, np.ndarray]:
            row = 4 if l2 else 1
            moved = view.thresholds.clone()
            moved[row] = last[view.queries].reshape(moved[row].shape)
            near = self._reached(view._replace(thresholds=moved), distance, False)
            near &= view.query_codes != view.gallery_codes
            return _indices(near, tile), view.product[near].cpu().numpy()

        some = np.flatnonzero(lists.active)
        for part, (found, cosines) in self._views(tile, distance, some, candidates):
            found[:, 0] = some[part][found[:, 0]]
            q, g = found.T
            low = high = cosines
            if l2:
                p = queries.thresholds[2][q] * gallery.norms[0][g]
                low = (low - limits.margin) * p - gallery.norms[1][g]
                high = (high + limits.margin) * p - gallery.norms[2][g]
            pair = 0
            while pair < len(q):
                pair, count = position_kernels.keep_pairs(
                    q, g + tile.g.start, low, high, pair, counted, pairs
                )
                yield count

    def _views(
        self, tile: Tile, d: str, queries: np.ndarray, compute: Callable[[_View], T]
    ) -> Iterator[tuple[slice, T]]:
        """Compute something of runs of these queries, small enough for the memory."""
        place = self.places[tile.product.device]
        n, others = tile.q.stop - tile.q.start, tile.g.stop - tile.g.start
        index = None
        if len(queries) < n:
            index = torch.from_numpy(queries).to(tile.product.device)

        def run(part: slice) -> T:
            return compute(_view(place, tile, d, part if index is None else index[part]))

        return _chunks(len(queries), max(1, _PAIRS // others), run)


class _View(NamedTuple):
    """Some queries of a tile, in shapes that broadcast over the product."""

    queries: Any  # a slice, or indices (A,)
    product: Tensor  # (A, B), or (B, A)
    thresholds: Tensor  # (5, A, 1), or (5, 1, A); so is all that follows
    query_codes: Tensor
    tying: Tensor
    norms: Tensor
    gallery_codes: Tensor
    groups: Tensor


def _view(place: _Place, tile: Tile, d: str, some: Any) -> _View:
    row, column = (-2, -1) if tile.transposed else (-1, -2)  # the axes that are added
    return _View(
        some,
        tile.product[:, some] if tile.transposed else tile.product[some],
        place.thresholds[:, tile.q][:, some].unsqueeze(row),
        place.query_codes[tile.q][some].unsqueeze(row),
        place.tying[d][tile.q][some].unsqueeze(row),
        place.norms[:, tile.g].unsqueeze(column),
        place.gallery_codes[tile.g].unsqueeze(column),
        place.groups[d][tile.g].unsqueeze(column),
    )


def _indices(mask: Tensor, tile: Tile) -> np.ndarray:
    """(n, 2) query and item of the pairs in a mask of the product, in the order of the mask."""
    found = mask.nonzero().cpu().numpy()
    return np.ascontiguousarray(found[:, ::-1]) if tile.transposed else found


def _chunks(count: int, size: int, compute: Callable[[slice], T]) -> Iterator[tuple[slice, T]]:
    """Compute runs of `size` rows; a run that does not fit the memory is halved."""
    start = 0
    while start < count:
        part = slice(start, min(start + size, count))
        try:
            found = compute(part)
        except torch.OutOfMemoryError:
            if part.stop - start == 1:
                raise
            torch.cuda.empty_cache()
            size = (part.stop - start) // 2
            continue
        yield part, found
        start = part.stop


def _out_of_memory() -> DmlError:
    return DmlError(
        "The memory of the GPU is full.",
        "Not even a small part of a tile fits: other programs use it.",
        "Wait for them, or count on the CPU: --device cpu",
    )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type != "cuda":
        return available_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused  # kept by torch for this process


def _units(vectors: Vectors, part: slice, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(vectors.units(part))).to(device)


def _units_on(device: torch.device, vectors: Vectors) -> Tensor:
    """All unit vectors, copied block by block."""
    out = torch.empty(vectors.vectors.shape, dtype=torch.float32, device=device)
    for part in blocks(vectors.vectors):
        out[part] = torch.from_numpy(np.ascontiguousarray(vectors.units(part)))
    return out
