"""Items with paths."""

import numpy as np
import pytest


@pytest.fixture
def items(clustered):
    """Vectors, labels and paths."""
    X, labels = clustered
    return X, labels, np.array([f"{n:03}.jpg" for n in range(len(X))])
