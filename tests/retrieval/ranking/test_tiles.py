"""Counting by tiles: any tile, in float32 or float64, gives the exact ranks."""

import numpy as np
import pytest

from retrieval.ranking import tiles
from tests.retrieval.ranking.references import HARD, assert_exact, ranks_of


@pytest.mark.parametrize("pairs", [1 << 14, 4], ids=["float32 tiles", "float64 tiles"])
@pytest.mark.parametrize("name", HARD)
def test_ranks_and_ties_are_those_of_exact_arithmetic(name, pairs, monkeypatch, rng):
    monkeypatch.setattr(tiles, "_PAIRS", pairs)  # 4: every tile with doubts is redone in float64
    X = HARD[name]
    assert_exact(X, rng.integers(0, 6, len(X)), block=16)


def test_ranks_do_not_depend_on_block_threads_or_row_order(rng):
    labels = rng.integers(0, 9, 300)
    X = np.repeat(rng.standard_normal((100, 8)), 3, axis=0).astype(np.float32)  # many ties
    reference = ranks_of(X, labels)
    order = rng.permutation(300)
    for options in ({"block": 13}, {"threads": 1}, {"block": 64, "threads": 5}, {"memory": 1}):
        shuffled = ranks_of(X[order], labels[order], **options)
        for distance in ("cos", "l2"):
            assert (shuffled[distance].rank == reference[distance].rank[order]).all()
            assert (shuffled[distance].ties == reference[distance].ties[order]).all()


def test_progress_reaches_the_total(rng):
    seen = []
    ranks_of(
        rng.standard_normal((50, 3)),
        rng.integers(0, 3, 50),
        block=8,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == 28


def test_an_interrupt_stops_the_count(rng):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks_of(rng.standard_normal((500, 3)), np.arange(500) % 5, block=8, progress=interrupt)
