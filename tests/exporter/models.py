"""Small ONNX models, made by hand."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from exporter.onnx.metadata import to_properties

FLOAT, HALF, UINT8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8
OURS = {
    "schema": 1,
    "arch": "mean",
    "embedding_dim": 3,
    "l2_normalized": False,
    "input_layout": "nhwc",
    "input_dtype": "uint8",
    "normalizes_input": True,
    "resize": 8,
    "keep_ratio": True,
    "crop": 8,
    "interpolation": "bilinear",
    "mean": [0.0, 0.0, 0.0],
    "std": [1.0, 1.0, 1.0],
}
PROPERTIES = to_properties(OURS)


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


def mean_model(shape=("batch", 8, 8, 3), kind=UINT8, properties=None, axes=(1, 2), out=None):
    """The mean colour of each image: an embedding of three numbers."""
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["embeddings"], axes=list(axes), keepdims=0),
    ]
    out = [shape[0], 3] if out is None else out
    return model_of(nodes, [("images", kind, shape)], [("embeddings", FLOAT, out)], properties)


def endless_model(path, batch="batch"):
    """The mean colour of each image, to which zero is added for ever."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_in"], ["go_out"]),
            helper.make_node("Mul", ["sum_in", "one"], ["sum_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("n", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("go_in", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_in", FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_out", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_out", FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Loop", ["trips", "", "mean"], ["embeddings"], body=body),
    ]
    weights = [
        numpy_helper.from_array(np.int64(2**62), "trips"),
        numpy_helper.from_array(np.float32(1), "one"),
    ]
    onnx.save(
        model_of(
            nodes,
            [("images", UINT8, [batch, 8, 8, 3])],
            [("embeddings", FLOAT, [batch, 3])],
            weights=weights,
        ),
        path,
    )


def colours(images):
    """What `mean_model` makes of images, in float64."""
    return images.mean((1, 2), dtype=np.float64)
