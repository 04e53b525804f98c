"""The view of a report is as its type says."""

from dataclasses import replace

import numpy as np

from retrieval.reporting.view import View
from tests.retrieval.made import file, names
from tests.retrieval.reporting.views import QUICK, noise, view_of
from tests.retrieval.typed import faults


def test_a_view_has_all_that_its_type_names_and_nothing_else(clustered, rng):
    X, labels = clustered
    other = X + rng.standard_normal(X.shape).astype(np.float32)
    view = view_of(file(X, labels, names(60)), file(other, labels, names(60)), pictures=noise)
    assert view["compare"][0]["flips"]
    assert view["thumbs"]["images"]
    assert faults(view, View) == []


def test_a_view_of_little_data_is_of_the_same_type():
    view = view_of(file(np.eye(2), [0, 1]), options=replace(QUICK, map="none"))
    assert (view["map"], view["histograms"]["cos"]["overlap"]) == (None, None)
    assert faults(view, View) == []
