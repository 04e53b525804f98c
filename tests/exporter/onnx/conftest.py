"""A place for models, and images for them."""

import numpy as np
import pytest
from onnx import save


@pytest.fixture
def saved(tmp_path):
    def save_model(model, name="model.onnx"):
        save(model, tmp_path / name)
        return tmp_path / name

    return save_model


@pytest.fixture
def images(rng):
    return rng.integers(0, 256, (5, 8, 8, 3), np.uint8)
