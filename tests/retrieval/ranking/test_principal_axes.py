"""Skipping pairs by their leading principal axes: the ranks are those of all pairs."""

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import prepare
from tests.retrieval.ranking.references import HARD, assert_exact, listed, ranks_of


def embeddings(rng, decay, *, noise=0.5, N=600, D=96, C=60):
    """Classes with axes of falling length, turned so that no axis stands alone; labels."""
    labels = rng.integers(0, C, N)
    rows = rng.standard_normal((C, D))[labels] + noise * rng.standard_normal((N, D))
    turned = rows * np.arange(1, D + 1.0) ** -decay @ np.linalg.qr(rng.standard_normal((D, D)))[0]
    return turned.astype(np.float32), labels


def counter(X, labels, axes, positions=False):
    problem = from_arrays(X, labels)
    return TileCounter(prepare(problem, ("l2", "cos"), 1 << 30, 1), positions, block=256, axes=axes)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("name", [name for name in HARD if HARD[name].shape[1] > 2])
def test_skipping_gives_the_ranks_and_ties_of_exact_arithmetic(name, axes, rng):
    X = HARD[name]
    assert_exact(X, rng.integers(0, 6, len(X)), block=16, axes=axes)
    queries, gallery = X[:20], X[15:]
    labels, query_labels = rng.integers(0, 6, len(gallery)), rng.integers(0, 8, 20)
    assert_exact(gallery, labels, queries, query_labels, axes=axes)


@pytest.mark.parametrize("decay", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("axes", [1, 24, 95])
def test_skipping_changes_no_rank_and_no_position(decay, axes, rng):
    X, labels = embeddings(rng, decay)
    X[::7] *= 30  # lengths differ, so the distances do
    X[3], X[4] = 0, X[5]
    plain = ranks_of(X, labels, positions=True, axes=0)
    skipping = ranks_of(X, labels, positions=True, axes=axes, block=100)
    for d in ("l2", "cos"):
        assert (skipping[d].rank == plain[d].rank).all()
        assert (skipping[d].ties == plain[d].ties).all()
        assert (skipping[d].nearest == plain[d].nearest).all()
        assert listed(skipping[d].positions) == listed(plain[d].positions)


def test_tails_that_hide_the_nearest_negative_are_multiplied(rng):
    """The leading axes say that the negatives are far; the tails make one of them nearest."""
    D = 128
    X = np.zeros((40, D), np.float32)
    X[:, :4] = rng.standard_normal((40, 4)) * 0.5
    X[:, 4:] = rng.standard_normal((40, D - 4)) * 0.1
    X[1, 4:] = X[0, 4:] = 3 * X[0, 4:]  # of another class, and near in the tail alone
    X[1, :4] = -X[0, :4]
    labels = np.arange(40) // 2 + 1
    labels[0], labels[1] = 0, 99
    labels[2] = 0
    assert_exact(X[:12], labels[:12], axes=4)


def test_skipping_is_chosen_where_the_spectrum_falls_and_nowhere_else(rng):
    falling, labels = embeddings(rng, 1.0, noise=0.3, N=21_000, D=512, C=2000)
    flat, _ = embeddings(rng, 0.0, noise=3.0, N=21_000, D=512, C=2000)
    assert counter(falling, labels, None).backend.axes is not None
    assert counter(flat, labels, None).backend.axes is None
    assert counter(falling[:2000], labels[:2000], None).backend.axes is None  # a cheap product


def test_most_pairs_of_a_falling_spectrum_are_skipped(rng):
    X, labels = embeddings(rng, 1.0, noise=0.3, D=256)
    found = counter(X, labels, 32)
    part = slice(0, 256), slice(256, 512)
    product = np.empty([some.stop - some.start for some in part], np.float32)
    found.backend.axes.product(*part, found.limits.margin, found.limits.reaches, product)
    skipped = product == -2
    assert skipped.mean() > 0.9
    units = X / np.linalg.norm(X, axis=1, keepdims=True)
    full = units[part[0]].astype(np.float64) @ units[part[1]].T
    assert np.abs(product - full)[~skipped].max() < found.limits.margin
    # A skipped pair reaches the threshold of neither of its two queries.
    cos = found.limits.thresholds[1]
    assert (full < cos[part[0], None])[skipped].all()
    assert (full < cos[None, part[1]])[skipped].all()
