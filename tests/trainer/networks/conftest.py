"""Build networks without drawing weights, and replace downloads."""

import pytest
import torch

from tests.trainer.networks.weights import refuse


@pytest.fixture
def undrawn(monkeypatch):
    """Weights of any value: to draw the random ones of large networks takes longest."""
    names = ("kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "normal_", "uniform_")
    for name in names:
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty folder for downloads, and no network."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    return tmp_path / "hub" / "checkpoints"
