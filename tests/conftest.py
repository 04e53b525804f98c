"""Small data that several test files use."""

import signal

import numpy as np
import pytest

# Background jobs of a shell are deaf to Ctrl-C, and so is what they start; here it is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests, and the processes they start, leave nothing in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def clustered(rng):
    """60 vectors around 6 centres and their labels: right more often than not, never always."""
    labels = np.arange(60) % 6
    vectors = rng.standard_normal((6, 8))[labels] + 0.8 * rng.standard_normal((60, 8))
    return vectors.astype(np.float32), labels
