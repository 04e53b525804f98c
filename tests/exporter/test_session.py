"""Model files are looked at without trust, and run."""

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from exporter.metadata import to_properties
from exporter.session import Session, describe

FLOAT, UINT8 = TensorProto.FLOAT, TensorProto.UINT8
OURS = {
    "schema": 1, "arch": "mean", "embedding_dim": 3, "l2_normalized": False,
    "input_layout": "nhwc", "input_dtype": "uint8", "normalizes_input": True,
    "resize": 8, "keep_ratio": True, "crop": 8, "interpolation": "bilinear",
    "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0],
}  # fmt: skip


def model_of(nodes, inputs, outputs, properties=None, weights=()):
    """inputs and outputs: (name, type, shape)"""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        initializer=list(weights),
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, properties or {})
    return made


def mean_model(shape=("batch", 8, 8, 3), kind=UINT8, properties=None, axes=(1, 2)):
    """The mean colour of each image: an embedding of three numbers."""
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["embeddings"], axes=list(axes), keepdims=0),
    ]
    return model_of(
        nodes, [("images", kind, shape)], [("embeddings", FLOAT, [shape[0], 3])], properties
    )


@pytest.fixture
def ours(tmp_path):
    path = tmp_path / "model.onnx"
    save(mean_model(properties=to_properties(OURS)), path)
    return path


@pytest.fixture
def images(rng):
    return rng.integers(0, 256, (5, 8, 8, 3), np.uint8)


def test_a_model_of_dmltool_needs_nothing_but_its_file(ours, images):
    model = describe(ours)
    assert (model.input_name, model.output_name) == ("images", "embeddings")
    assert (model.layout, model.dtype, model.size) == ("nhwc", "uint8", (8, 8))
    assert (model.batch, model.dim) == (None, 3)
    session = Session(model, "cpu")
    assert session.provider == "cpu"
    np.testing.assert_allclose(session.run(images), images.mean((1, 2)), rtol=1e-5)
