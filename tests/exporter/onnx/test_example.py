"""The example of docs/onnx.md prepares images to the bit as dmltool does."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper, save
from PIL import Image

from exporter.onnx.metadata import to_properties
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from tests.exporter.models import FLOAT, OURS, UINT8, model_of
from trainer.data.images import read_rgb
from trainer.data.transforms import for_testing

PAGE = Path(__file__).parents[3] / "docs" / "onnx.md"
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


def example(folder):
    """The embedding that the code of the page gives for image.jpg."""
    code = re.search(r"```py\n(.*?)```", PAGE.read_text(), re.S)[1]
    assert len([line for line in code.splitlines() if line]) <= 18
    done = subprocess.run(
        [sys.executable, "-c", code + CHECKS], cwd=folder, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return np.load(folder / "embedding.npy")


def ours(folder):
    session = Session(describe(folder / "model.onnx"), "cpu")
    prepared = session.preprocessing
    spec = prepared.spec()
    image = read_rgb(folder / "image.jpg", spec.short_side, prepared.background)
    return session.run(for_testing(image, spec)[None])[0]


@pytest.mark.parametrize(
    ("resize", "keep_ratio", "interpolation", "size", "turn", "draft"),
    [
        (36, True, "bilinear", (400, 300), 1, 1),  # decoded at an eighth
        (36, True, "bilinear", (400, 300), 1, 2),  # at a quarter
        (36, True, "bilinear", (400, 300), 1, 0),  # at full size
        (36, True, "bilinear", (400, 300), 1, None),  # as models that do not say it
        (36, True, "bilinear", (61, 95), 6, 2),
        (36, False, "bicubic", (30, 47), 1, 2),
        (0, True, "bilinear", (64, 51), 1, 2),
    ],
)
def test_the_example_reproduces_an_embedding(
    tmp_path, rng, resize, keep_ratio, interpolation, size, turn, draft
):
    pixels = rng.integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(pixels).resize(size).save(tmp_path / "image.jpg", exif=exif)
    values = {"resize": resize, "keep_ratio": keep_ratio, "interpolation": interpolation}
    values |= {} if draft is None else {"draft": draft, "background": [255, 255, 255]}
    save(sensitive_model(32, **values), tmp_path / "model.onnx")
    np.testing.assert_allclose(example(tmp_path), ours(tmp_path), rtol=1e-6)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("background", [[255, 255, 255], [0, 9, 200], None])
def test_the_example_shows_the_background_where_an_image_is_transparent(
    tmp_path, rng, mode, background
):
    pixels = rng.integers(0, 256, (50, 60, 4), np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    options = {"transparency": 5} if mode == "P" else {}
    image.save(tmp_path / "image.jpg", "PNG", **options)
    values = {} if background is None else {"background": background}
    save(sensitive_model(32, resize=36, **values), tmp_path / "model.onnx")
    found = example(tmp_path)
    np.testing.assert_allclose(found, ours(tmp_path), rtol=1e-6)
    image.convert("RGBA").convert("RGB").save(tmp_path / "image.jpg", "PNG")  # what lies beneath
    assert np.abs(found - ours(tmp_path)).max() > 100
