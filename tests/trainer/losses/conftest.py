"""Every test of a loss begins with the same seed; fixtures for several of their files."""

import warnings

import pytest
import torch

from tests.trainer.losses.references import LABELS, D


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def quiet():
    """Small batches need pce's floor, and its warning has a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the lambda of the loss 'pce'", UserWarning)
        yield


@pytest.fixture
def exact():
    """A batch of float64 embeddings and its labels, for the loops of references.py."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(len(LABELS), D, dtype=torch.float64, generator=generator)
    return z, torch.tensor(LABELS)
