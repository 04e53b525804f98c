"""The torch backend beyond the exactness tests that both backends share: memory and devices."""

import threading

import numpy as np
import pytest
import torch

from retrieval.errors import DmlError
from retrieval.problem import from_arrays
from retrieval.ranking.backends import torch as backend
from retrieval.ranking.backends.torch import TorchBackend
from retrieval.ranking.ranks import count_ranks
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import prepare
from tests.retrieval.ranking.references import HARD, counted_by, exact_ranks, listed, ranks_of

NO_GPU = "torch finds no GPU, so the ranks of one cannot be compared with those of a CPU"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


@pytest.fixture
def clusters(rng):
    """Embeddings in classes, with lengths that differ, identical rows and a zero row; labels."""
    labels = rng.integers(0, 30, 400)
    X = rng.standard_normal((30, 12))[labels] + rng.standard_normal((400, 12))
    X = (X * rng.uniform(0.5, 2, (400, 1))).astype(np.float32)
    X[5], X[6], X[7] = X[50], X[51], 0
    return X, labels


def everything(X, labels, **options):
    """All that is counted, as lists."""
    found = ranks_of(X, labels, positions=True, **options)
    return {
        d: (r.rank.tolist(), r.ties.tolist(), r.nearest.tolist(), listed(r.positions))
        for d, r in found.items()
    }


def counter(X, labels, **options) -> TileCounter:
    prepared = prepare(from_arrays(X, labels), ("l2", "cos"), 1 << 30, 1)
    return TileCounter(prepared, False, devices=("cpu",), **options)


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_one_distance_alone_is_all_that_is_compared(distance, clusters, monkeypatch):
    compared, reached = [], TorchBackend._reached

    def watched(self, view, d, sure):
        compared.append(d)
        return reached(self, view, d, sure)

    monkeypatch.setattr(TorchBackend, "_reached", watched)
    with counted_by("torch"):
        ranks_of(*clusters, distances=(distance,), block=128)
    assert set(compared) == {distance}


def test_vectors_that_do_not_fit_the_device_are_streamed(clusters, monkeypatch):
    X, labels = clusters
    expected = everything(X, labels)
    monkeypatch.setattr(backend, "free_memory", lambda device: X.size * 4)
    place = counter(X, labels).backend.places[torch.device("cpu")]
    assert place.queries is None
    assert place.gallery is None
    with counted_by("torch"):
        assert everything(X, labels) == expected
        assert everything(X, labels, block=64) == expected


def test_vectors_are_streamed_where_the_free_memory_is_in_pieces(clusters, monkeypatch):
    expected = everything(*clusters)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(backend, "_units_on", full)
    with counted_by("torch"):
        assert everything(*clusters) == expected


def test_tiles_are_sized_by_the_free_memory(monkeypatch, rng):
    X = rng.standard_normal((9000, 2)).astype(np.float32)
    labels = np.arange(9000) // 3
    sizes = {}
    for free in (1 << 20, 1 << 24, 1 << 40):
        monkeypatch.setattr(backend, "free_memory", lambda device, free=free: free)
        sizes[free] = counter(X, labels).backend.block
    assert sizes == {1 << 20: 256, 1 << 24: 768, 1 << 40: 1024}
    assert 8 * 768**2 <= 0.8 * (1 << 24) / 2  # of each of two threads
    assert counter(X, labels, block=100).backend.block == 100


def limited(function, most, sizes):
    """The function with a memory for so many rows."""

    def limits(*given):
        rows = (
            max(given[0].shape) if isinstance(given[0], torch.Tensor) else given[1].product.numel()
        )
        sizes.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function(*given)

    return limits


def test_a_full_memory_halves_the_tiles_and_counts_go_on(clusters, monkeypatch):
    X, labels = clusters
    expected, rows, pairs = everything(X, labels), [], []
    monkeypatch.setattr(backend, "multiply", limited(backend.multiply, 60, rows))
    monkeypatch.setattr(TorchBackend, "_reached", limited(TorchBackend._reached, 3000, pairs))
    with counted_by("torch"):
        assert everything(X, labels, block=200) == expected
    assert max(rows) == 200
    assert max(pairs) > 3000


def test_a_memory_that_holds_not_even_a_row_is_an_error(clusters, monkeypatch):
    monkeypatch.setattr(backend, "multiply", limited(backend.multiply, 0, []))
    with counted_by("torch"), pytest.raises(DmlError, match="memory of the GPU is full"):
        ranks_of(*clusters)


def test_threads_are_dealt_out_to_the_devices(clusters):
    found = counter(*clusters).backend
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    found._turns = iter(devices * 2)
    seen = []

    def look():
        seen.append([found._device() for _ in range(3)])

    for _ in range(4):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [[device] * 3 for device in devices * 2]


def test_products_do_without_tf32_while_ranks_are_counted(clusters, monkeypatch):
    seen = set()
    multiply = backend.multiply

    def look(*given):
        seen.add((torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32))
        return multiply(*given)

    monkeypatch.setattr(backend, "multiply", look)
    torch.set_float32_matmul_precision("high")  # as a training may have it
    try:
        with counted_by("torch"):
            ranks_of(*clusters)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {("highest", False)}


@on_gpu
def test_a_gpu_gives_the_ranks_and_ties_of_exact_arithmetic(rng):
    for name, X in HARD.items():
        labels = rng.integers(0, 6, len(X))
        expected = exact_ranks(X, labels)
        found = count_ranks(from_arrays(X, labels), device="cuda", block=16)
        for d, pairs in expected.items():
            assert list(zip(found[d].rank, found[d].ties, strict=True)) == pairs, (name, d)


@on_gpu
def test_a_gpu_counts_what_a_cpu_counts(rng):
    labels = rng.integers(0, 500, 20_000)
    X = rng.standard_normal((500, 256))[labels] + 2 * rng.standard_normal((20_000, 256))
    X = X.astype(np.float32)
    assert everything(X, labels, device="cuda") == everything(X, labels, device="cpu")
