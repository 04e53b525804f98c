"""Items with paths, and a browser."""

import shutil

import numpy as np
import pytest

from tests.browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    one = Browser(program, tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def items(clustered):
    """Vectors, labels and paths."""
    X, labels = clustered
    return X, labels, np.array([f"{n:03}.jpg" for n in range(len(X))])
