"""What a model says of itself survives its properties, and is all that others need to run it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper, save
from PIL import Image

from exporter.onnx.metadata import (
    Preprocessing,
    describe_checkpoint,
    read_properties,
    to_properties,
)
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from retrieval.errors import DmlError
from tests.exporter.models import FLOAT, OURS, UINT8, model_of
from trainer.config import INTERPOLATIONS, Config, Input, Network
from trainer.data.images import read_rgb
from trainer.data.transforms import for_testing

PLAIN = Preprocessing(256, True, 224, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def checkpoint_of(config):
    """What of a checkpoint the metadata need."""
    return {
        "config": config.to_dict(),
        "preprocessing": {
            "mean": list(PLAIN.mean),
            "std": list(PLAIN.std),
            "antialias": True,
            "resize": 256,
            "keep_ratio": True,
            "crop": 224,
            "interpolation": "bilinear",
        },
        "versions": {"python": "3.11", "torch": "2.13"},
    }


@pytest.fixture
def state():
    return checkpoint_of(Config(network=Network("resnet50", dim=512)))


numbers = st.floats(-1e3, 1e3).map(lambda x: round(x, 6))
preprocessings = st.builds(
    lambda side, more, keep, kind, mean, std, form, *others: Preprocessing(
        side + more, keep, side, kind, mean, std, *form, *others
    ),
    st.integers(8, 4096),
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from(INTERPOLATIONS),
    st.tuples(numbers, numbers, numbers),
    st.tuples(*[st.floats(1e-4, 1e3)] * 3),
    st.sampled_from(
        [("nhwc", "uint8", True), ("nchw", "float32", False), ("nchw", "float16", True)]
    ),
    st.sampled_from([1, 255]),
    st.sampled_from(["RGB", "BGR"]),
    st.tuples(*[st.integers(0, 255)] * 3),
    st.integers(0, 8),
)


@given(preprocessings)
def test_preprocessing_survives_json_and_properties(prepared):
    assert Preprocessing.from_dict(json.loads(json.dumps(prepared.to_dict()))) == prepared
    huge = prepared.to_dict() | {"mean": f"[{'0,' * 100_000}0]"}
    with pytest.raises(DmlError, match="is not a shorter text"):
        Preprocessing.from_dict(huge)
    values = prepared.to_dict()
    for name, key in (("layout", "input_layout"), ("dtype", "input_dtype")):
        values[key] = values.pop(name)
    values["normalizes_input"] = values.pop("inside")
    found = read_properties(to_properties({"schema": 1, **values}))
    assert found.preprocessing == prepared


def test_a_checkpoint_is_described_and_read_back(state):
    properties = to_properties(describe_checkpoint(state, "abc", 512, normalize=True))
    assert all(isinstance(value, str) for value in properties.values())
    names = (
        "schema arch embedding_dim l2_normalized input_layout size resize keep_ratio crop "
        "interpolation antialias mean std loss dataset checkpoint_sha256 versions precision"
    )
    assert {f"dmltool.{name}" for name in names.split()} <= properties.keys()
    found = read_properties({**properties, "dmltool.parity": '{"max_abs": 1e-6}', "other": "x"})
    assert found.preprocessing == PLAIN
    assert (found.arch, found.dim, found.normalized) == ("resnet50", 512, True)
    assert (found.loss, found.dataset, found.precision) == ("ce", "glyphs", "fp32")
    assert (found.checkpoint_sha256, found.versions) == ("abc", state["versions"])
    assert found.parity == {"max_abs": 1e-6}
    assert found.others == {"size": "224", "antialias": "true"}


def test_models_and_checkpoints_without_draft_and_background_keep_theirs(state):
    """Before there was a choice, JPEGs were reduced to the short side and white lay behind."""
    new = {"draft": 2, "background": [255, 255, 255]}
    now = state | {"preprocessing": state["preprocessing"] | new}
    properties = to_properties(describe_checkpoint(now, "", 512))
    assert properties["dmltool.draft"] == "2"
    assert properties["dmltool.background"] == "[255, 255, 255]"
    found = read_properties(properties).preprocessing
    assert (found.draft, found.spec().short_side) == (2, 512)
    old = {k: v for k, v in properties.items() if k.split(".")[1] not in ("draft", "background")}
    for before in (read_properties(old).preprocessing, Preprocessing.from_checkpoint(state)):
        assert (before.draft, before.spec().short_side) == (1, 256)
        assert before.background == (255, 255, 255)


def test_the_form_of_the_input_is_told(state):
    found = read_properties(
        to_properties(describe_checkpoint(state, "", 512, input="float-nchw"))
    ).preprocessing
    assert found == replace(PLAIN, layout="nchw", dtype="float32")


def test_models_of_others_have_no_metadata_of_ours():
    assert read_properties({"author": "somebody", "stride": "32"}) is None


@pytest.mark.parametrize("schema", ["2", "", "one", None])
def test_another_schema_is_refused(state, schema):
    properties = to_properties(describe_checkpoint(state, "", 512)) | {"dmltool.schema": schema}
    if schema is None:
        del properties["dmltool.schema"]
    with pytest.raises(DmlError, match="schema"):
        read_properties(properties)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mean", None),
        ("resize", None),
        ("mean", "0.5"),
        ("mean", "[1, 2]"),
        ("mean", "[1, 2, "),
        ("mean", '[1, 2, "3"]'),
        ("mean", "[NaN, 0, 0]"),
        ("std", "[1, 0, 1]"),
        ("std", "[1e999, 1, 1]"),
        ("crop", "224.5"),
        ("crop", "true"),
        ("crop", "99999999"),
        ("crop", "1" * 5000),
        ("crop", "-8"),
        ("keep_ratio", "yes"),
        ("interpolation", "cubic"),
        ("input_layout", "chw"),
        ("input_dtype", "float64"),
        ("embedding_dim", "many"),
        ("versions", "[]"),
        ("parity", "{"),
        ("mean", "[" * 900),
        ("versions", "[" * 100_000),
        ("l2_normalized", "maybe"),
        ("precision", "fp8"),
        ("draft", "-1"),
        ("draft", "9"),
        ("scale", "2"),
        ("color", "GBR"),
        ("background", "[0, 0, 256]"),
        ("background", "white"),
        ("background", "[0, 0]"),
        ("background", "[0, 0, 0.5]"),
        ("division", "3"),
        ("division", "{"),
        ("division", '{"val_fraction": 2}'),
        ("division", '{"val_seed": "x"}'),
    ],
)
def test_damaged_properties_are_an_error_of_ours(state, key, value):
    properties = to_properties(describe_checkpoint(state, "", 512))
    if value is None:
        del properties[f"dmltool.{key}"]
    else:
        properties[f"dmltool.{key}"] = value
    with pytest.raises(DmlError, match="metadata is damaged") as caught:
        read_properties(properties)
    assert len(caught.value.why) < 300
    assert not re.search("char 0|Exceeds", caught.value.why)  # of the parser of JSON


def test_a_checkpoint_without_preprocessing_is_an_error(state):
    del state["preprocessing"]["mean"]
    with pytest.raises(DmlError, match="does not say") as caught:
        Preprocessing.from_checkpoint(state)
    assert "mean is missing" in caught.value.why


def test_a_preprocessing_that_makes_no_sense_lists_what_is_wrong():
    with pytest.raises(DmlError, match="no sense") as caught:
        replace(PLAIN, crop=4, scale=7)
    assert [line.split(" = ")[0] for line in caught.value.why.splitlines()] == [
        "input.crop",
        "scale",
    ]


def test_the_spec_prepares_images_as_in_evaluation(rng):
    image = rng.integers(0, 256, (300, 400, 3), np.uint8)
    wanted = for_testing(image, Input(256, True, 224, "bilinear"))
    np.testing.assert_array_equal(for_testing(image, PLAIN.spec()), wanted)


def test_bytes_reach_the_model_as_they_are(rng):
    batch = rng.integers(0, 256, (2, 4, 5, 3), np.uint8)
    assert PLAIN.to_input(batch) is batch
    turned = replace(PLAIN, layout="nchw").to_input(batch)
    assert turned.flags.c_contiguous
    np.testing.assert_array_equal(turned[1, 2], batch[1, :, :, 2])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("float16", 2e-3)])
def test_floats_are_scaled_and_normalised_once(rng, inside, dtype, error):
    batch = rng.integers(0, 256, (2, 4, 5, 3), np.uint8)
    prepared = replace(PLAIN, layout="nchw", dtype=dtype, inside=inside)
    found = prepared.to_input(batch)
    assert (found.dtype, found.shape) == (dtype, (2, 3, 4, 5))
    wanted = batch.astype(np.float64) / 255
    if not inside:
        wanted = (wanted - PLAIN.mean) / PLAIN.std
    np.testing.assert_allclose(found, wanted.transpose(0, 3, 1, 2), atol=error)


def test_the_module_needs_neither_torch_nor_onnx():
    code = (
        "import sys, exporter.onnx.metadata; sys.exit(bool({'torch', 'onnx'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# The example of docs/onnx.md prepares images to the bit as dmltool does.

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
