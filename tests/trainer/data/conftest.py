"""Data sets of small pictures, and a cache folder of their own."""

import numpy as np
import pytest
from PIL import Image

from tests.trainer.data.pictures import Squares
from trainer.data.datasets.records import build


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "dmltool"


@pytest.fixture
def data(tmp_path, rng):
    """24 JPEGs and PNGs of several sizes, 4 training classes and 2 test classes."""
    rows = []
    for number in range(24):
        kind = ("jpg", "png")[number % 2]
        path = f"{number % 6}/{number}.{kind}"
        (tmp_path / str(number % 6)).mkdir(exist_ok=True)
        width, height = rng.integers(50, 200, 2)
        coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.BICUBIC).save(tmp_path / path)
        rows.append((path, str(number % 6), "train" if number % 6 < 4 else "test"))
    return build("folder", tmp_path, rows)


@pytest.fixture
def squares():
    rows = [(str(n), str(n % 5), "train" if n % 5 < 3 else "test") for n in range(30)]
    return build("squares", None, rows, Squares())


@pytest.fixture
def picture(rng):
    """(H, W, 3) with structure at several sizes and no symmetry."""

    def make(width, height):
        coarse = rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.BICUBIC))
        noise = rng.integers(-20, 21, smooth.shape)
        return np.clip(smooth + noise, 0, 255).astype(np.uint8)

    return make
