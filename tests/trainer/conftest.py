"""Small pictures and a config for them."""

from dataclasses import replace

import pytest
import torch

from retrieval.errors import DmlError
from tests.trainer.small import draw_pictures, small_config
from trainer.run.half_precision import allow_half


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Networks this small gain nothing from more, and wait for each other on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def bf16():
    """Skips where the processor has none."""
    try:
        allow_half(torch.bfloat16)
    except DmlError as error:
        pytest.skip(str(error))
    return torch.bfloat16


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    return draw_pictures(tmp_path_factory.mktemp("pictures") / "data")


@pytest.fixture
def config(pictures):
    return small_config(pictures)


@pytest.fixture
def change(config):
    """change(loss=Loss(...)) is the config with other tables; change(run={...}) with other keys."""

    def changed(**tables):
        parts = {
            name: replace(getattr(config, name), **part) if isinstance(part, dict) else part
            for name, part in tables.items()
        }
        return replace(config, **parts)

    return changed
