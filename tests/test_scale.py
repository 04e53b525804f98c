"""The arithmetic of docs/scale.md: by hand, and against the rows that an evaluation reads."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scale import BLOCK, Machine, plan
from retrieval import resources
from retrieval.distributed.world import ALONE
from retrieval.evaluation import Settings, score
from retrieval.problem import Problem, from_arrays
from retrieval.ranking.tiles import TileCounter
from tests.ranks import in_threads


def test_costs_of_ten_million_vectors_are_those_by_hand():
    machine = Machine(cores=10, memory=1e12, read=1e9, send=1e9)
    cost = plan(10**7, 4, flops_per_core=1e10, dim=100, itemsize=4, machine=machine)
    assert cost.flops == 1e16  # half of the product, two operations each
    # A file of 4 GB is read and compared, a quarter of it for thresholds, all for the tiles.
    assert cost.read == 13e9
    assert cost.sent == pytest.approx(1.5 * 10**7 * 2 * 8 * 66)
    assert cost.seconds == pytest.approx(25_000 + 13 + 15.84)  # 4 x 10 cores count


def test_one_machine_sends_nothing_and_samples_take_the_whole_product():
    cost = plan(10**6, 1, 1000, flops_per_core=1e10, dim=64)
    assert cost.sent == 0
    assert cost.flops == 2 * 1000 * 10**6 * 64


def test_a_file_beyond_the_memory_is_read_tile_by_tile():
    small, large = (
        plan(10**6, 2, flops_per_core=1e10, dim=64, machine=Machine(memory=memory), block=1000)
        for memory in (1e12, 1e6)
    )
    assert large.read - small.read == pytest.approx(1000**2 / 2 / 2 * 1000 * 64 * 2)


def test_tiles_are_those_of_32_threads_with_one_megabyte_of_cache_each(monkeypatch):
    monkeypatch.setattr(resources, "cache_bytes", lambda level: (level == 3) << 25)
    assert resources.tile_rows(10**7, Machine().cores) == BLOCK


class Watched(np.ndarray):
    """Rows that note for each step of an evaluation which of them were read."""

    def __array_finalize__(self, source):
        self.steps = getattr(source, "steps", None)

    def begin(self):
        self.steps.append(np.zeros(len(self), bool))

    def __getitem__(self, rows):
        return self._read(rows)

    def take(self, rows, axis):
        return self._read(rows)

    def _read(self, rows):
        self.steps[-1][rows] = True
        return self.view(np.ndarray)[rows]


@pytest.fixture
def vectors(monkeypatch):
    """Makes rows that are watched; a step begins where the code says so."""
    monkeypatch.setattr(np, "asarray", np.asanyarray)  # which keeps what watches

    def begins(owner, name, watched):
        honest = getattr(owner, name)

        def step(self, *given, **options):
            watched(self, *given).begin()
            return honest(self, *given, **options)

        monkeypatch.setattr(owner, name, step)

    begins(Problem, "checksum", lambda problem: problem.gallery)
    begins(TileCounter, "__init__", lambda _, prepared, *more: prepared.gallery.vectors)
    begins(TileCounter, "count", lambda counter, *_: counter.prepared.gallery.vectors)

    def made(rows):
        X = rows.view(Watched)
        X.steps = []
        X.begin()
        return X

    return made


N, D, POSITIVES = 1100, 4096, 10
SETTINGS = Settings(nmi=False, recall_at=1, threads=1, resamples=10, memory=64 << 20)
"""Unit vectors take more than a quarter of the memory, so that tiles read the rows."""


@pytest.mark.parametrize(
    ("machines", "queries", "passes"),
    [
        (1, None, 3),  # lengths, thresholds, tiles
        (2, None, 3.5),  # and a comparison; thresholds are shared
        (1, 20, 2.18),  # thresholds of the sample only: 200 rows of 1,100
        (2, 20, 2.59),  # one block of queries: each gallery block goes to one machine
    ],
)
def test_each_machine_reads_as_many_rows_as_planned(machines, queries, passes, vectors, rng):
    rows, labels = rng.standard_normal((N, D)).astype(np.float16), np.arange(N) // (POSITIVES + 1)

    def read(world):
        X = vectors(rows)
        score(from_arrays(X, labels), replace(SETTINGS, queries=queries), world=world)
        return sum(step.mean() for step in X.steps)

    found = in_threads(machines, read) if machines > 1 else [read(ALONE)]
    cost = plan(N, machines, queries, flops_per_core=1, dim=D)
    assert np.mean(found) == pytest.approx(passes, rel=0.01)  # of few tasks, shares are uneven
    assert cost.read == pytest.approx(passes * N * D * 2, rel=0.01)
