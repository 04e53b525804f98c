"""A model is described by its file alone."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

from exporter.onnx.metadata import to_properties
from exporter.onnx.model import describe
from retrieval.errors import DmlError
from tests.exporter.models import FLOAT, OURS, mean_model, model_of


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


def test_an_output_of_whole_numbers_is_no_embedding(saved):
    nodes = [helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0)]
    made = model_of(nodes, [("x", FLOAT, ["n", 3, 8, 8])], [("best", 7, ["n", 8])])
    with pytest.raises(DmlError, match="no embedding"):
        describe(saved(made))


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
