"""A model is described by its file alone, and run as it was described."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper, save

from exporter.onnx.foreign import Given, foreign_preprocessing
from exporter.onnx.metadata import Preprocessing, to_properties
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from retrieval.errors import DmlError
from tests.exporter.models import FLOAT, HALF, OURS, PROPERTIES, UINT8, mean_model, model_of

ROOT = Path(__file__).parents[3]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture
def saved(tmp_path):
    def save_model(model, name="model.onnx"):
        save(model, tmp_path / name)
        return tmp_path / name

    return save_model


@pytest.fixture
def images(rng):
    return rng.integers(0, 256, (5, 8, 8, 3), np.uint8)


def colours(images):
    return images.mean((1, 2), dtype=np.float64)


def test_a_model_of_dmltool_needs_nothing_but_its_file(saved, images):
    model = describe(saved(mean_model(properties=PROPERTIES)))
    assert (model.input_name, model.output_name) == ("images", "embeddings")
    assert (model.layout, model.dtype, model.size) == ("nhwc", "uint8", (8, 8))
    assert (model.batch, model.dim) == (None, 3)
    assert model.metadata.arch == "mean"
    session = Session(model, "cpu")
    assert session.provider == "cpu"
    found = session.run(images)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, colours(images), rtol=1e-5)
    assert session.run(images[:0]).shape == (0, 3)


def test_float_input_of_dmltool_gets_zero_to_one(saved, images):
    values = {**OURS, "input_layout": "nchw", "input_dtype": "float32"}
    path = saved(mean_model(("n", 3, 8, 8), FLOAT, to_properties(values), (2, 3)))
    found = Session(describe(path), "cpu").run(images)
    np.testing.assert_allclose(found, colours(images) / 255, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_a_fixed_batch_is_filled_up_and_its_filling_left_out(saved, images, batch):
    session = Session(describe(saved(mean_model((batch, 8, 8, 3), properties=PROPERTIES))), "cpu")
    assert session.model.batch == batch
    np.testing.assert_allclose(session.run(images), colours(images), rtol=1e-5)


def test_threads_may_share_a_session(saved, images):
    session = Session(describe(saved(mean_model(properties=PROPERTIES))), "cpu", threads=1)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(session.run, [images] * 20):
            np.testing.assert_allclose(found, colours(images), rtol=1e-5)


def test_a_file_replaced_after_it_was_looked_at_is_not_run(saved):
    model = describe(saved(mean_model(properties=PROPERTIES)))
    saved(mean_model())
    with pytest.raises(DmlError, match="was changed"):
        Session(model, "cpu")


def test_nan_and_infinity_are_errors(saved, images):
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Log", ["mean"], ["embeddings"]),
    ]
    shape = ["n", 8, 8, 3]
    path = saved(
        model_of(nodes, [("images", UINT8, shape)], [("embeddings", FLOAT, ["n", 3])], PROPERTIES)
    )
    session = Session(describe(path), "cpu")
    assert np.isfinite(session.run(images)).all()
    images[3] = 0
    with pytest.raises(DmlError, match="NaN or infinity") as caught:
        session.run(images)
    assert "1 of 5" in caught.value.why


def test_a_frozen_batch_inside_the_graph_is_told(saved, images):
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("Reshape", ["floats", "shape"], ["embeddings"]),
    ]
    weights = [numpy_helper.from_array(np.array([1, -1]), "shape")]
    inputs, outputs = [("images", UINT8, ["n", 8, 8, 3])], [("embeddings", FLOAT, ["n", "d"])]
    values = {key: value for key, value in OURS.items() if key != "embedding_dim"}
    path = saved(model_of(nodes, inputs, outputs, to_properties(values), weights))
    session = Session(describe(path), "cpu")
    assert session.model.dim is None
    assert session.dim == 8 * 8 * 3
    with pytest.raises(DmlError, match="1 embeddings for 5 images"):
        session.run(images)


def test_images_of_another_size_are_an_error_not_a_traceback(saved, images):
    session = Session(describe(saved(mean_model(properties=PROPERTIES))), "cpu")
    with pytest.raises(DmlError, match="batch of 5, 4 x 8 pixels each") as caught:
        session.run(images[:, :4])
    assert caught.value.why.startswith("Got invalid dimensions for input")


def test_an_operator_unknown_to_the_runtime_is_an_error(saved):
    nodes = [helper.make_node("Magic", ["images"], ["embeddings"], domain="elsewhere")]
    made = model_of(nodes, [("images", UINT8, ["n", 8, 8, 3])], [("embeddings", FLOAT, ["n", 3])])
    made.opset_import.append(helper.make_opsetid("elsewhere", 1))
    helper.set_model_props(made, PROPERTIES)
    with pytest.raises(DmlError, match="cannot be run by ONNX Runtime") as caught:
        Session(describe(saved(made)), "cpu")
    assert "elsewhere" in caught.value.why


# Inputs


def two_inputs(*_):
    node = helper.make_node("Add", ["a", "b"], ["embeddings"])
    shape = ["n", 3, 8, 8]
    return model_of(
        [node], [("a", FLOAT, shape), ("b", FLOAT, shape)], [("embeddings", FLOAT, shape)]
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (two_inputs(), ["has 2 inputs", "a (any x 3 x 8 x 8), b (any x 3 x 8 x 8)"]),
        (mean_model(("n", 128), axes=(1,)), ["does not take images", "four axes"]),
        (mean_model(("n", 1, 28, 28), FLOAT), ["does not take images", "any x 1 x 28 x 28"]),
        (mean_model(("n", 8, 8, 4)), ["does not take images", "red, green and blue"]),
        (mean_model(("n", 8, 8, 3), 9), ["does not take images", "uint8"]),  # booleans
    ],
)
def test_what_takes_no_images_is_refused(saved, made, words):
    with pytest.raises(DmlError) as caught:
        describe(saved(made))
    for word in words:
        assert word in str(caught.value)


def test_weights_listed_as_inputs_are_no_inputs(saved):
    node = helper.make_node("Add", ["images", "w"], ["embeddings"])
    weights = [numpy_helper.from_array(np.ones(3, np.float32), "w")]
    shape = ["n", 8, 8, 3]
    inputs = [("images", FLOAT, shape), ("w", FLOAT, [3])]
    made = model_of([node], inputs, [("embeddings", FLOAT, ["n", 3])], weights=weights)
    assert describe(saved(made)).input_name == "images"


@pytest.mark.parametrize(
    ("shape", "layout", "size"),
    [
        (("n", 3, 8, 8), "nchw", (8, 8)),
        (("n", 8, 6, 3), "nhwc", (8, 6)),
        (("n", 3, "h", "w"), "nchw", None),
        (("n", "c", 8, 8), "nchw", (8, 8)),
        (("n", 8, 8, "c"), "nhwc", (8, 8)),
        (("n", "a", "b", "c"), "", None),
        (("n", 3, 8, 3), "", None),
    ],
)
def test_the_layout_is_found_where_the_shape_tells_it(saved, shape, layout, size):
    model = describe(saved(mean_model(shape, FLOAT)))
    assert (model.layout, model.size) == (layout, size)


# Outputs


def two_outputs(first="pooled", second="map"):
    nodes = [
        helper.make_node("ReduceMean", ["x"], [first], axes=[2, 3], keepdims=0),
        helper.make_node("Relu", ["x"], [second]),
    ]
    outputs = [(second, FLOAT, ["n", 3, 8, 8]), (first, FLOAT, ["n", 3])]
    return model_of(nodes, [("x", FLOAT, ["n", 3, 8, 8])], outputs)


def test_of_several_outputs_one_must_be_named(saved):
    path = saved(two_outputs())
    with pytest.raises(DmlError, match="has 2 outputs") as caught:
        describe(path)
    assert "--output-name pooled" in caught.value.fix
    assert describe(path, "pooled").output_name == "pooled"
    assert describe(saved(two_outputs("embeddings"))).output_name == "embeddings"


def test_an_unknown_output_is_answered_with_the_nearest(saved):
    with pytest.raises(DmlError, match="no output 'poled'") as caught:
        describe(saved(two_outputs()), "poled")
    assert "map (any x 3 x 8 x 8), pooled (any x 3)" in caught.value.why
    assert caught.value.fix == "Did you mean 'pooled'? --output-name pooled"


def test_a_feature_map_is_refused_with_advice(saved):
    with pytest.raises(DmlError, match="not a batch of embeddings") as caught:
        describe(saved(two_outputs()), "map")
    assert "pooling" in caught.value.fix
    assert "--output-name pooled" in caught.value.fix


def test_a_feature_map_that_the_file_does_not_admit_is_found_when_run(saved, images):
    nodes = [helper.make_node("Cast", ["images"], ["embeddings"], to=FLOAT)]
    made = model_of(
        nodes, [("images", UINT8, ["n", 8, 8, 3])], [("embeddings", FLOAT, None)], PROPERTIES
    )
    with pytest.raises(DmlError, match="5 x 8 x 8 x 3"):
        Session(describe(saved(made)), "cpu").run(images)


def test_an_output_of_whole_numbers_is_no_embedding(saved):
    nodes = [helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0)]
    made = model_of(nodes, [("x", FLOAT, ["n", 3, 8, 8])], [("best", 7, ["n", 8])])
    with pytest.raises(DmlError, match="no embedding"):
        describe(saved(made))


# Metadata against graph


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_layout": "nchw"}, "input layout: nchw in the metadata, nhwc in the graph"),
        ({"input_dtype": "float32"}, "input type: float32 in the metadata, uint8 in the graph"),
        ({"crop": 16, "resize": 16}, "image size: (16, 16) in the metadata, (8, 8) in the graph"),
        ({"embedding_dim": 4}, "embedding_dim: 4 in the metadata, 3 in the graph"),
    ],
)
def test_metadata_that_contradicts_the_graph_is_refused(saved, change, words):
    with pytest.raises(DmlError, match="contradicts itself") as caught:
        describe(saved(mean_model(properties=to_properties({**OURS, **change}))))
    assert words in caught.value.why


# Foreign models


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
        ({"mean": (1, 2)}, "mean = [1.0, 2.0]: a list of 3"),
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


def test_describing_and_running_write_nothing(saved, images, tmp_path):
    path = saved(mean_model(properties=PROPERTIES))
    np.save(tmp_path / "images.npy", images)
    code = (
        "import numpy, sys\n"
        "from exporter.onnx.model import describe\n"
        "from exporter.onnx.session import Session\n"
        f"session = Session(describe({str(path)!r}), 'auto')\n"
        f"session.run(numpy.load({str(tmp_path / 'images.npy')!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
