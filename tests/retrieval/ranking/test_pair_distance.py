"""Exact comparison of single pairs."""

from decimal import Decimal, localcontext

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking import pair_distance
from retrieval.ranking.vectors import prepare
from tests.retrieval.ranking.references import ranks_of


@pytest.mark.parametrize(
    "X", [0.1 * np.eye(60), np.diag(np.linspace(1, 2, 60))], ids=["equal", "of any length"]
)
def test_ties_of_float64_rows_need_no_arithmetic_of_long_integers(X, monkeypatch):
    def slow(*_):
        raise AssertionError("compared pair by pair")

    monkeypatch.setattr(pair_distance, "_compare_one", slow)
    found = ranks_of(X, np.arange(60) % 6, distances=("cos",), positions=True)["cos"]
    assert (found.rank == 51).all()
    assert (found.ties == 50).all()


def test_two_items_far_from_the_query_are_compared_by_their_difference(monkeypatch, rng):
    monkeypatch.delattr(pair_distance, "_compare_one")
    rows = rng.standard_normal((3, 50, 16)).astype(np.float32)
    rows[0] *= np.float32(1e17)  # float64 cannot tell the squared distances apart
    query, item, best = (side.astype(object) for side in rows.astype(np.float64) * 2.0**40)
    exact = [[[int(v) for v in row] for row in side] for side in (query, item, best)]
    far = [
        [
            sum((a - b) ** 2 for a, b in zip(q, x, strict=True))
            for q, x in zip(exact[0], side, strict=True)
        ]
        for side in exact[1:]
    ]
    expected = [(b > i) - (b < i) for i, b in zip(*far, strict=True)]
    assert pair_distance._compare(*rows, "l2").tolist() == expected


def test_bounds_of_cosines_hold_the_exact_chord(rng):
    rows, some = rng.standard_normal((2, 500, 2))
    X = np.concatenate([rows, 3 * rows, *(rows * (1 + off * some) for off in (1e-16, 1e-12, 1e-5))])
    prepared = prepare(from_arrays(X, np.zeros(len(X), int)), ("cos",), 1 << 20, 1)
    q, g = np.arange(2000) % 500, np.arange(500, 2500)
    found = pair_distance.measure(prepared, q, g, "cos")
    with localcontext(prec=60):
        for query, item, squared, error in zip(X[q].tolist(), X[g].tolist(), *found, strict=True):
            pairs = (query, item), (query, query), (item, item)
            dots = [
                sum(Decimal(a) * Decimal(b) for a, b in zip(*pair, strict=True)) for pair in pairs
            ]
            chord = 2 - 2 * dots[0] / (dots[1] * dots[2]).sqrt()
            assert abs(Decimal(squared) - chord) <= Decimal(error)


def test_whole_numbers_whose_sums_float64_rounds_are_compared_exactly(rng):
    best = rng.integers(-(2**26), 2**26, (200, 4)).astype(np.float64)
    item = rng.permuted(best, axis=1)  # the same terms, added up in another order
    for distance, query in (("l2", np.zeros_like(best)), ("cos", np.ones_like(best))):
        assert not pair_distance._compare(query, item, best, distance).any()


@pytest.mark.parametrize("kind", ["float32", "lattice", "with a zero row"])
def test_a_class_is_measured_as_its_pairs_are(kind, rng):
    X = rng.standard_normal((9, 40)).astype(np.float32)
    if kind == "lattice":
        X = np.rint(3 * X)
    X[3] = X[2]
    if kind != "lattice":
        X[4] = X[2] * np.float32(1 + 1e-7)  # nearly identical
    X[8] = 0 if kind == "with a zero row" else X[8]
    prepared = prepare(from_arrays(X, np.zeros(9, int)), ("l2", "cos"), 1 << 20, 1)
    assert prepared.lattice == (kind == "lattice")
    everything = np.arange(9)
    found = pair_distance.measure_class(prepared, everything, everything)
    q, g = np.nonzero(~np.eye(9, dtype=bool))
    for d in found:
        squared, error = pair_distance.measure(prepared, q, g, d)
        assert (np.abs(found[d][0][q, g] - squared) <= found[d][1][q, g] + error).all()
        same = (q == 2) & (g == 3)
        assert found[d][0][2, 3] == squared[same]  # too near for a product
        assert np.isinf(np.diag(found[d][0])).all()  # a query is no neighbour of itself
