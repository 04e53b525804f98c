"""Exact comparison of single pairs."""

import numpy as np
import pytest

from retrieval.ranking import pair_distance
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
