"""Images are prepared for foreign models as plain Pillow and NumPy would prepare them."""

import json

import numpy as np
import pytest
from onnx import helper, save
from PIL import Image

from cli import main
from exporter.embedding.embed import embed
from exporter.onnx.foreign import Given, foreign_preprocessing
from exporter.onnx.metadata import Preprocessing
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from retrieval import load
from retrieval.errors import DmlError
from tests.exporter.models import FLOAT, HALF, PROPERTIES, UINT8, colours, mean_model, model_of
from trainer.config import INTERPOLATIONS

SIDE = 16
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def flattening(kind=FLOAT, layout="nchw"):
    """A model whose embedding is its input."""
    shape = ["n", 3, SIDE, SIDE] if layout == "nchw" else ["n", SIDE, SIDE, 3]
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("Flatten", ["floats"], ["embeddings"]),
    ]
    outputs = [("embeddings", FLOAT, ["n", 3 * SIDE * SIDE])]
    return model_of(nodes, [("images", kind, shape)], outputs)


@pytest.fixture
def photos(tmp_path, rng):
    """Two classes of JPEGs and transparent PNGs, none of them square."""
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for n, (width, height) in enumerate([(90, 61), (47, 120)]):
            coarse = rng.integers(0, 256, (7, 9, 4), np.uint8)
            image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            image.save(tmp_path / "photos" / label / f"{n}.png")
            large = image.convert("RGB").resize((8 * width, 8 * height))
            large.save(tmp_path / "photos" / label / f"{n}.jpg")
    return tmp_path / "photos"


def plain(path, *, resize=SIDE, squash=False, kind="bilinear", background=(255, 255, 255)):
    """(SIDE, SIDE, 3) uint8, by Pillow alone"""
    image = Image.open(path).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, background), image).convert("RGB")
    short = min(image.size)
    size = [resize if squash else int(resize * side / short) for side in image.size]
    filter = Image.Resampling[kind.upper()]
    image = image.resize((size[0], image.height), filter).resize(size, filter)
    left, top = (round((side - SIDE) / 2) for side in image.size)
    return np.asarray(image.crop((left, top, left + SIDE, top + SIDE)))


def embedded(tmp_path, photos, kind=FLOAT, layout="nchw", **said):
    """Path and input of each image, as the model saw it, and the preprocessing in the file."""
    save(flattening(kind, layout), tmp_path / "net.onnx")
    out = tmp_path / "out.h5"
    embed(tmp_path / "net.onnx", str(photos), out, provider="cpu", force=True, **said)
    found = load(out)
    part = found.splits["test"]
    shape = (-1, 3, SIDE, SIDE) if layout == "nchw" else (-1, SIDE, SIDE, 3)
    recorded = json.loads(found.attrs["preprocessing"])
    return dict(zip(part.paths, part.vectors.reshape(shape), strict=True)), recorded


CASES = {
    "torchvision": (IMAGENET | {"resize": 20}, {"resize": 20}),
    "clip": (
        {"mean": (0.48, 0.46, 0.41), "std": (0.27, 0.26, 0.28), "interpolation": "bicubic"},
        {"kind": "bicubic"},
    ),
    "caffe": (
        {"mean": (123.68, 116.779, 103.939), "std": (1, 1, 1), "scale": 255, "bgr": True}
        | {"squash": True, "interpolation": "nearest"},
        {"squash": True, "kind": "nearest"},
    ),
    "arcface": ({"mean": [127.5] * 3, "std": [127.5] * 3, "scale": 255, "bgr": True}, {}),
    "on black": (IMAGENET | {"background": (0, 0, 0)}, {"background": (0, 0, 0)}),
    "squash, then crop": (
        IMAGENET | {"resize": 24, "squash": True},
        {"resize": 24, "squash": True},
    ),
} | {
    kind: ({"mean": (0, 0, 0), "std": (1, 1, 1), "interpolation": kind}, {"kind": kind})
    for kind in INTERPOLATIONS
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_foreign_model_sees_what_pillow_and_numpy_make(tmp_path, photos, case, layout):
    said, how = CASES[case]
    found, recorded = embedded(tmp_path, photos, layout=layout, no_draft=True, **said)
    assert len(found) == 8
    for path, seen in found.items():
        pixels = plain(photos / path, **how).astype(np.float64)
        wanted = (pixels * said.get("scale", 1) / 255 - said["mean"]) / said["std"]
        wanted = wanted[..., ::-1] if said.get("bgr") else wanted
        wanted = wanted.transpose(2, 0, 1) if layout == "nchw" else wanted
        np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-4)
    assert recorded["scale"] == said.get("scale", 1)
    assert recorded["color"] == ("BGR" if said.get("bgr") else "RGB")
    assert recorded["background"] == list(said.get("background", (255, 255, 255)))
    assert recorded["keep_ratio"] == (not said.get("squash"))
    assert recorded["interpolation"] == said.get("interpolation", "bilinear")
    assert recorded["draft"] == 0


def test_a_model_of_bytes_may_want_bgr(tmp_path, photos):
    found, _ = embedded(tmp_path, photos, UINT8, "nhwc", bgr=True, no_draft=True)
    for path, seen in found.items():
        np.testing.assert_array_equal(seen[..., ::-1], plain(photos / path))


def test_large_jpegs_are_reduced_unless_that_is_switched_off(tmp_path, photos):
    zero = {"mean": (0, 0, 0), "std": (1, 1, 1), "scale": 255}
    full, _ = embedded(tmp_path, photos, no_draft=True, **zero)
    reduced, recorded = embedded(tmp_path, photos, **zero)
    assert recorded["draft"] == 2
    for path, seen in full.items():
        apart = np.abs(seen - reduced[path]).mean()
        assert (0 < apart < 3) if path.endswith("jpg") else apart == 0


@pytest.mark.parametrize(
    ("said", "words", "fix"),
    [
        ({"mean": (127, 127, 127)}, "--mean 127,127,127 is outside", "--scale 255"),
        ({"mean": (-0.5, 0, 0)}, "--mean -0.5,0,0 is outside", ""),
        ({"mean": (300, 0, 0)}, "--mean 300,0,0 is outside", ""),
        ({"std": (58.4, 57.1, 57.4)}, "--std 58.4,57.1,57.4 is outside", "--scale 255"),
        ({"scale": 255}, "are of colours from 0 to 1, and --scale 255", "--scale 1"),
        ({"scale": 255, "mean": (300, 0, 0), "std": (1, 1, 1)}, "go from 0 to 255", ""),
    ],
)
def test_values_that_cannot_be_meant_are_refused(tmp_path, said, words, fix):
    save(flattening(), tmp_path / "net.onnx")
    with pytest.raises(DmlError, match="is not known") as caught:
        foreign_preprocessing(describe(tmp_path / "net.onnx"), Given(**IMAGENET | said))
    assert words in caught.value.why
    assert fix in caught.value.fix


def test_the_command_takes_the_options(tmp_path, photos):
    from click.testing import CliRunner

    save(flattening(), tmp_path / "net.onnx")
    out = tmp_path / "o.h5"
    base = ["embed", str(tmp_path / "net.onnx"), str(photos), "--out", str(out)]
    bad = CliRunner().invoke(main, [*base, "--mean", "127,127,127", "--std", "1,1,1"])
    assert bad.exit_code == 1
    assert "--scale 255" in bad.stderr
    flags = "--scale 255 --mean 127.5,127.5,127.5 --std 127.5,127.5,127.5 --bgr --squash"
    flags += " --interpolation lanczos --background 0,0,0 --no-draft"
    done = CliRunner().invoke(main, [*base, *flags.split()])
    assert done.exit_code == 0, done.stderr
    recorded = json.loads(load(out).attrs["preprocessing"])
    assert (recorded["scale"], recorded["color"], recorded["draft"]) == (255, "BGR", 0)
    assert (recorded["background"], recorded["interpolation"]) == ([0, 0, 0], "lanczos")
    for odd in ("1,2", "1,2,256", "1,2,x"):
        assert CliRunner().invoke(main, [*base, "--background", odd]).exit_code == 2


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.parquet", "x", "x.h5.gz"])
def test_embed_writes_only_to_names_of_hdf5_files(tmp_path, photos, name):
    save(flattening(), tmp_path / "net.onnx")
    with pytest.raises(DmlError, match=f"{name} is not the name of an embedding file") as caught:
        embed(tmp_path / "net.onnx", str(photos), tmp_path / name, provider="cpu", **IMAGENET)
    assert caught.value.why == "Its name ends in .h5 or .hdf5 or .he5."
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "photos"}


def test_the_option_offers_every_interpolation_that_there_is():
    """It lists them itself: importing them would slow every command down."""
    [option] = [each for each in main.commands["embed"].params if each.name == "interpolation"]
    assert tuple(option.type.choices) == INTERPOLATIONS


def test_a_foreign_model_gets_the_mean_and_std_that_the_user_names(saved, images):
    model = describe(saved(mean_model(("n", 3, 8, 8), FLOAT, axes=(2, 3))))
    assert model.preprocessing is None
    prepared = foreign_preprocessing(model, Given(**IMAGENET))
    assert (prepared.layout, prepared.crop, prepared.resize) == ("nchw", 8, 8)
    found = Session(model, "cpu", preprocessing=prepared).run(images)
    wanted = (colours(images) / 255 - IMAGENET["mean"]) / IMAGENET["std"]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_foreign_model_of_half_precision_runs(saved, images):
    model = describe(saved(mean_model(("n", 8, 8, 3), HALF)))
    prepared = foreign_preprocessing(model, Given(mean=(0, 0, 0), std=(1, 1, 1)))
    assert prepared.to_input(images).dtype == np.float16
    found = Session(model, "cpu", preprocessing=prepared).run(images)
    np.testing.assert_allclose(found, colours(images) / 255, atol=1e-3)


def test_a_foreign_model_of_bytes_needs_no_mean(saved, images):
    model = describe(saved(mean_model()))
    session = Session(model, "cpu")
    np.testing.assert_allclose(session.run(images), colours(images), rtol=1e-5)
    with pytest.raises(DmlError, match="is not known"):
        foreign_preprocessing(model, Given(mean=(0, 0, 0)))


def test_all_that_is_missing_is_told_at_once(saved):
    model = describe(saved(mean_model(("n", "a", "b", "c"), FLOAT)))
    for call in (foreign_preprocessing, lambda model: Session(model, "cpu")):
        with pytest.raises(DmlError, match="is not known") as caught:
            call(model)
        for flag in ("--size 224", "--layout nchw", "--mean 0.485", "--std 0.229"):
            assert flag in caught.value.fix
    prepared = foreign_preprocessing(model, Given(32, layout="nhwc", **IMAGENET))
    assert prepared == Preprocessing(
        32, True, 32, "bilinear", *IMAGENET.values(), "nhwc", "float32", False, draft=2
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"size": 16}, "--size 16: it takes 8 x 8 pixels"),
        ({"layout": "nhwc"}, "--layout nhwc: it takes nchw"),
        ({"layout": "hwc"}, "--layout hwc: it takes nchw"),
        ({"std": (1, 0, 1)}, "above 0"),
        ({"mean": (1, 2)}, "mean = [1.0, 2.0] is not a list of 3"),
        ({"resize": 4}, "does not fit"),
    ],
)
def test_flags_that_do_not_fit_a_foreign_model_are_errors(saved, flags, words):
    model = describe(saved(mean_model(("n", 3, 8, 8), FLOAT)))
    with pytest.raises(DmlError) as caught:
        foreign_preprocessing(model, Given(**{**IMAGENET, **flags}))
    assert words in caught.value.why


def test_a_model_that_takes_no_squares_is_refused(saved):
    model = describe(saved(mean_model(("n", 3, 16, 8), FLOAT)))
    with pytest.raises(DmlError) as caught:
        foreign_preprocessing(model, Given(**IMAGENET))
    assert "16 x 8 pixels, not a square" in caught.value.why


def test_the_preprocessing_of_our_models_cannot_be_overruled(saved):
    model = describe(saved(mean_model(properties=PROPERTIES)))
    assert foreign_preprocessing(model) is model.preprocessing
    with pytest.raises(DmlError, match="contains the preprocessing") as caught:
        foreign_preprocessing(model, Given(size=8, mean=(0, 0, 0)))
    assert caught.value.fix == "Leave out --size, --mean."
