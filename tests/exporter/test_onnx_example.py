"""The example of docs/onnx.md prepares images to the bit as dmltool does."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper, save
from PIL import Image

from exporter.metadata import to_properties
from exporter.session import Session, describe
from tests.exporter.models import FLOAT, OURS, UINT8, model_of
from trainer.images import read_rgb
from trainer.transforms import for_testing

PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
CHECKS = """
import sys
np.save("embedding.npy", embedding)
assert not {"torch", "onnx", "exporter"} & sys.modules.keys()
"""


def sensitive_model(crop, **values):
    """A random projection of all pixels: a single wrong one shows."""
    weights = np.random.default_rng(0).standard_normal((crop * crop * 3, 16), np.float32)
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("Flatten", ["floats"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["embeddings"]),
    ]
    properties = to_properties({**OURS, "crop": crop, "embedding_dim": 16, **values})
    inputs = [("images", UINT8, ["n", crop, crop, 3])]
    outputs = [("embeddings", FLOAT, ["n", 16])]
    return model_of(
        nodes, inputs, outputs, properties, [numpy_helper.from_array(weights, "weights")]
    )


@pytest.mark.parametrize(
    ("resize", "keep_ratio", "interpolation", "size", "turn"),
    [
        (36, True, "bilinear", (400, 300), 1),  # decoded at an eighth
        (36, True, "bilinear", (61, 95), 6),
        (36, False, "bicubic", (30, 47), 1),
        (0, True, "bilinear", (64, 51), 1),
    ],
)
def test_the_example_reproduces_an_embedding(
    tmp_path, rng, resize, keep_ratio, interpolation, size, turn
):
    code = re.search(r"```py\n(.*?)```", PAGE.read_text(), re.S)[1]
    assert len([line for line in code.splitlines() if line]) <= 15
    pixels = rng.integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(pixels).resize(size).save(tmp_path / "image.jpg", exif=exif)
    made = sensitive_model(32, resize=resize, keep_ratio=keep_ratio, interpolation=interpolation)
    save(made, tmp_path / "model.onnx")
    session = Session(describe(tmp_path / "model.onnx"), "cpu")
    spec = session.preprocessing.spec()
    image = for_testing(read_rgb(tmp_path / "image.jpg", spec.resize or None), spec)
    done = subprocess.run(
        [sys.executable, "-c", code + CHECKS], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wanted = session.run(image[None])[0]
    np.testing.assert_allclose(np.load(tmp_path / "embedding.npy"), wanted, rtol=1e-6)
