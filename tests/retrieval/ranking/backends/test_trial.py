"""The trial of a device refuses every product that is not float32."""

import numpy as np
import pytest
import torch

from retrieval.ranking.backends import trial
from retrieval.ranking.backends.torch import TorchBackend


@pytest.fixture(autouse=True)
def forgets():
    trial.fault_of.cache_clear()
    yield
    trial.fault_of.cache_clear()


def tf32(x):
    """Rounded to 10 bits after the point."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def two_halves(a, b):
    """The larger products of a number's two bfloat16 halves."""
    (a1, a2), (b1, b2) = (
        (high, (x - high).bfloat16().float()) for x in (a, b) for high in (x.bfloat16().float(),)
    )
    return torch.matmul(a1, b1) + torch.matmul(a1, b2) + torch.matmul(a2, b1)


WRONG = {
    "tf32": lambda a, b: torch.matmul(tf32(a), tf32(b)),
    "bfloat16": lambda a, b: torch.matmul(a.bfloat16(), b.bfloat16()).float(),
    "float16": lambda a, b: torch.matmul(a.half(), b.half()).float(),
    "two bfloat16": two_halves,
    "nan": lambda a, b: torch.matmul(a, b) * torch.nan,
}


def test_this_cpu_passes():
    assert trial.fault_of("cpu", 1) is None
    assert trial.fault_of("cpu", 2048) is None


@pytest.mark.parametrize("name", WRONG)
def test_a_product_of_lower_precision_is_refused(name, monkeypatch):
    monkeypatch.setattr(trial, "multiply", lambda a, b: WRONG[name](a, b.T))
    assert "times the error that float32 allows" in trial.fault_of("cpu", 128)


def test_a_device_that_counts_wrongly_is_refused(monkeypatch):
    count = TorchBackend.count
    monkeypatch.setattr(
        TorchBackend, "count", lambda *given: count(*given) + np.eye(4, 1, dtype=int)
    )
    assert trial.fault_of("cpu", 8) == "a trial count differs from that of the CPU"


def test_a_device_that_fails_is_refused(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: no kernel image is available.\nmore")

    monkeypatch.setattr(trial, "multiply", fail)
    found = trial.fault_of("cpu", 8)
    assert found == "a trial fails: CUDA error: no kernel image is available"
