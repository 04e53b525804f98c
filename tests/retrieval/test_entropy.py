"""Entropies of eq. 6 against loops over float64 numbers."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from retrieval.entropy import embedding_entropies, label_entropy
from retrieval.entropy import log_squares as log_squares_of
from retrieval.errors import DmlError
from retrieval.rows.identical import row_groups

RNG = np.random.default_rng(3)
LABELS = np.array([0, 1, 0, 2, 1, 0, 3, 1, 0, 1, 3])  # class 2 has one image
VECTORS = RNG.standard_normal((len(LABELS), 4))
VECTORS[8] = VECTORS[0]  # identical, of one class
VECTORS[10] = 3 * VECTORS[6]  # parallel


def log_squares(vectors, *args, **options):
    return log_squares_of(vectors, row_groups(vectors), *args, **options)


def loop_entropy(rows):
    """Eq. 6, over pairs of different rows."""
    n, d = len(rows), len(rows[0])
    logs = []
    for i in range(n):
        for j in range(n):
            square = sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True))
            if i != j and square > 1e-28:
                logs.append(math.log(square))
    return d * math.fsum(logs) / len(logs) if logs else None


def loop_given_labels(rows, labels):
    total = images = 0
    for k in set(labels):
        own = [row for row, y in zip(rows, labels, strict=True) if y == k]
        value = loop_entropy(own)
        if value is not None:
            total, images = total + len(own) * value, images + len(own)
    return total / images


def units(vectors):
    return [[x / math.hypot(*row) for x in row] for row in vectors.tolist()]


@pytest.mark.parametrize("distance", ["l2", "cos"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_entropies_are_those_of_equation_6(distance, dtype):
    vectors = VECTORS.astype(dtype)
    rows = vectors.astype(np.float64).tolist() if distance == "l2" else units(vectors)
    found = embedding_entropies(vectors, LABELS, distance)
    near = distance == "cos" and dtype == np.float32  # 3 x is rounded: directions 1e-8 apart
    rel = 1e-7 if near else 1e-11
    assert found["embeddings"] == pytest.approx(loop_entropy(rows), rel=rel)
    given = loop_given_labels(rows, LABELS.tolist())
    assert found["given_labels"] == pytest.approx(given, rel=rel)
    assert found["difference"] == pytest.approx(loop_entropy(rows) - given, rel=rel)
    parallel = dtype == np.float64 and distance == "cos"
    assert found["identical_pairs"] == 1 + parallel


def test_entropy_of_labels_is_that_of_their_frequencies():
    assert label_entropy(np.array(["a", "b", "b", "c"])) == pytest.approx(1.5 * math.log(2))
    assert label_entropy(np.zeros(5)) == 0
    assert label_entropy(np.arange(7)) == pytest.approx(math.log(7))


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("distance", ["l2", "cos"])
def test_tiles_do_not_change_the_sum(tile, distance):
    whole = log_squares(VECTORS, distance)
    found = log_squares(VECTORS, distance, tile=tile)
    assert found.total == pytest.approx(whole.total, rel=1e-12)
    assert found[1:] == whole[1:]
    assert whole.pairs + whole.identical == len(LABELS) * (len(LABELS) - 1) // 2


def test_near_vectors_far_from_the_origin_are_told_apart():
    """Products alone would lose all digits; differences do not."""
    vectors = 1e3 + 1e-6 * RNG.standard_normal((40, 3))
    vectors[20:] += 1e3  # two clusters: centring does not help
    exact = 0.0
    rows = [[Fraction(x) for x in row] for row in vectors.tolist()]
    for i in range(40):
        for j in range(i):
            exact += math.log(sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)))
    assert log_squares(vectors).total == pytest.approx(exact, rel=1e-8)


def test_scale_shifts_both_entropies_and_not_their_difference():
    one, ten = (embedding_entropies(f * VECTORS, LABELS) for f in (1, 10))
    shift = 4 * 2 * math.log(10)
    assert ten["embeddings"] - one["embeddings"] == pytest.approx(shift)
    assert ten["given_labels"] - one["given_labels"] == pytest.approx(shift)
    assert ten["difference"] == pytest.approx(one["difference"])


def test_tighter_classes_tell_more_about_labels():
    labels = np.arange(60) % 6
    centres, noise = RNG.standard_normal((6, 8))[labels], RNG.standard_normal((60, 8))
    tight, loose = (embedding_entropies(centres + s * noise, labels) for s in (0.1, 1))
    assert tight["difference"] > loose["difference"] > 0


@pytest.mark.parametrize("labels", [None, np.arange(3)])
def test_without_pairs_of_a_class_there_is_no_conditional_entropy(labels):
    found = embedding_entropies(VECTORS[:3], labels)
    assert found["embeddings"] is not None
    assert found["given_labels"] is None
    assert found["difference"] is None


def test_identical_vectors_have_no_entropy_and_take_no_time():
    found = embedding_entropies(np.ones((3000, 16), np.float32), np.zeros(3000), "cos")
    assert found["embeddings"] is None
    assert found["identical_pairs"] == 3000 * 2999 // 2


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_vectors_beyond_the_range_of_squares_are_an_error(size):
    with pytest.raises(DmlError, match=f"A vector of size .*e.{str(size)[-3:]} cannot"):
        embedding_entropies(VECTORS * size, LABELS)


def test_memory_does_not_grow_with_the_number_of_pairs():
    vectors = RNG.standard_normal((3000, 8)).astype(np.float32)
    log_squares(vectors[:300], tile=128)
    tracemalloc.start()
    log_squares(vectors, tile=128)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3000 * 3000 * 8 / 10


def test_the_entropy_of_one_class_is_zero_without_a_sign():
    assert str(label_entropy(np.zeros(4, int))) == "0.0"
