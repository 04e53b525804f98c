"""Results have the keys and values that their types name."""

import numpy as np
import pytest

from retrieval.comparison import compare
from retrieval.embeddings import provenance
from retrieval.evaluation import Settings, evaluate
from retrieval.inspection import inspect, with_entropy
from retrieval.results import Comparison, Inspection, Result, Source
from tests.retrieval.made import file
from tests.retrieval.typed import faults


@pytest.mark.parametrize("map_at_r", [True, False])
def test_an_evaluation_is_as_its_type_says(clustered, map_at_r):
    result = evaluate(*clustered, seeds=1, map_at_r=map_at_r)
    assert faults(result, Result) == []
    data = file(*clustered)
    assert faults(result | {"source": provenance(data)}, Result) == []
    assert faults(provenance(data), Source) == []


def test_a_comparison_is_as_its_type_says(items, rng):
    X, labels, paths = items
    other = X + rng.standard_normal(X.shape).astype(np.float32)
    result = compare(file(*items), file(other, labels, paths), Settings(nmi=False))
    assert result["flipped"]["l2"]["lost"]
    assert faults(result, Comparison) == []


def test_an_inspection_is_as_its_type_says(clustered):
    for data in (file(*clustered), file(np.full((3, 2), np.nan), [0, 0, 1])):
        found = inspect(data)
        assert faults(found, Inspection) == []
        assert faults(with_entropy(found, data), Inspection) == []


def test_what_differs_from_its_type_is_noticed(clustered):
    result = evaluate(*clustered, nmi=False)
    assert faults(result | {"dim": "8"}, Result) == [".dim: '8' is no <class 'int'>"]
    assert faults(result | {"checks": {"ties": None}}, Result)
    assert faults(result | {"new": 1}, Result) == [".new: unknown"]
    del result["notes"]
    assert faults(result, Result) == [".notes: missing"]
