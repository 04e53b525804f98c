"""Data full of ties, for several tests of reports."""

import numpy as np
import pytest

from tests.retrieval.made import file, names
from tests.retrieval.reporting.views import shop


@pytest.fixture(params=["leave-one-out", "query-gallery"])
def tied(request, rng):
    """Small whole numbers: ties in plenty, zero rows, copies, and classes of one item."""
    X = rng.integers(-2, 3, (70, 3)).astype(np.float32)
    X[5] = 0
    labels = rng.integers(0, 9, 70)
    labels[7] = 99  # nothing to find
    leave_out = request.param == "leave-one-out"
    data = file(X, labels, names(70)) if leave_out else shop(X, labels, 30, names(70))
    sides = (X, X, labels, labels) if leave_out else (X[:30], X[30:], labels[:30], labels[30:])
    return data, sides, leave_out
