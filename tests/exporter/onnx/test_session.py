"""A model is run as it was described."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from exporter.onnx.metadata import to_properties
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from retrieval.errors import DmlError
from tests.exporter.models import FLOAT, OURS, PROPERTIES, UINT8, colours, mean_model, model_of

ROOT = Path(__file__).parents[3]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


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
    assert "--precision" not in caught.value.fix  # it may be float32 already
    metadata = replace(session.model.metadata, precision="fp16")
    session.model = replace(session.model, metadata=metadata)
    with pytest.raises(DmlError) as caught:
        session.run(images)
    assert "dmltool export RUN --precision fp32 --force" in caught.value.fix


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


def test_a_feature_map_that_the_file_does_not_admit_is_found_when_run(saved, images):
    nodes = [helper.make_node("Cast", ["images"], ["embeddings"], to=FLOAT)]
    made = model_of(
        nodes, [("images", UINT8, ["n", 8, 8, 3])], [("embeddings", FLOAT, None)], PROPERTIES
    )
    with pytest.raises(DmlError, match="5 x 8 x 8 x 3"):
        Session(describe(saved(made)), "cpu").run(images)


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
