"""Small ONNX models, made by hand."""

from onnx import TensorProto, helper

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
