"""The nearest positive, through the ranks that follow from it."""

import numpy as np
import pytest

from retrieval.ranking import nearest_positive
from tests.retrieval.ranking.references import HARD, assert_exact, ranks_of


@pytest.mark.parametrize("name", HARD)
def test_large_classes_give_the_same_exact_ranks(name, monkeypatch, rng):
    monkeypatch.setattr(nearest_positive, "_LARGE", 0)
    X = HARD[name]
    assert_exact(X, rng.integers(0, 3, len(X)), block=16)


def test_a_query_without_a_positive_has_rank_zero():
    result = ranks_of(np.eye(3, dtype=np.float32), np.array([0, 0, 1]))
    assert result["cos"].rank.tolist()[2] == 0
    assert result["cos"].nearest.tolist() == [1, 0, -1]
