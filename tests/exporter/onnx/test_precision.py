"""float16 and int8: what is rounded, what is spared, and that retrieval survives."""

import json
import logging
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporter import parity
from exporter.onnx.model import describe
from exporter.onnx.precision import compare, head, in_order, last, tail, to_fp16, to_int8
from exporter.onnx.session import Session
from exporter.onnx.trace import save
from retrieval.errors import DmlError
from tests.exporter.networks import stripes


def pictures(count=64):
    return stripes(count, seed=1)[0]


def kinds(nodes):
    return [node.op_type for node in nodes]


@pytest.fixture(scope="module")
def half(exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("half") / "model.onnx"
    to_fp16(describe(exported), path)
    return path


@pytest.fixture(scope="module")
def eighth(exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("eighth") / "model.onnx"
    to_int8(describe(exported), path, pictures())
    return path


# Parts of the graph


def test_head_tail_and_last_are_found(exported, unit):
    plain, short = onnx.load(exported), onnx.load(unit)
    assert kinds(head(plain)) == ["Transpose", "Cast", "Div", "Sub", "Div"]
    assert kinds(head(short)) == ["Sub", "Div"]
    assert kinds(tail(plain)) == []
    assert sorted(kinds(tail(short))) == ["Clip", "Div", "Expand", "ReduceL2"]
    assert kinds(last(plain)) == ["Gemm", "Reshape", "AveragePool"]
    assert sorted(kinds(last(short))) == [
        "AveragePool",
        "Clip",
        "Div",
        "Expand",
        "Gemm",
        "ReduceL2",
        "Reshape",
    ]


def test_only_one_projection_is_spared():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("Gemm", ["a", "w"], ["b"], name="hidden"),
        helper.make_node("Flatten", ["b"], ["c"], name="flatten"),
        helper.make_node("Gemm", ["c", "w"], ["y"], name="projection"),
    ]
    values = [helper.make_tensor_value_info(name, 1, None) for name in "xy"]
    graph = helper.make_graph(nodes, "test", values[:1], values[1:])
    assert [n.name for n in last(helper.make_model(graph))] == ["projection", "flatten"]


def test_nodes_come_after_those_they_need():
    nodes = [
        helper.make_node("Add", ["b", "c"], ["d"], name="4"),
        helper.make_node("Relu", ["a"], ["b"], name="2"),
        helper.make_node("Relu", ["x"], ["a"], name="1"),
        helper.make_node("Add", ["b", "a"], ["c"], name="3"),
    ]
    assert [node.name for node in in_order(nodes)] == ["1", "2", "3", "4"]


# float16


def test_float16_halves_the_file_and_retrieves_alike(embedder, exported, half):
    assert half.stat().st_size < 0.52 * exported.stat().st_size
    images, labels = stripes()
    found = parity.check(embedder, Session(describe(half), "cpu", 1).run, images, labels)
    assert 1e-6 < found["max_rel"] < 3e-3
    assert found["agreement"] > 0.95
    parity.judge(found, "fp16")


def test_float16_spares_pixels_and_keeps_the_types_outside(exported, half):
    model, was = onnx.load(half), onnx.load(exported)
    for now, before in (
        (model.graph.input, was.graph.input),
        (model.graph.output, was.graph.output),
    ):
        assert [v.type.tensor_type.elem_type for v in now] == [
            v.type.tensor_type.elem_type for v in before
        ]
    assert kinds(head(model))[:5] == ["Transpose", "Cast", "Div", "Sub", "Div"]
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        wanted = TensorProto.FLOAT if node.op_type in ("Div", "Sub") else TensorProto.FLOAT16
        for name in node.input:
            if name in weights and weights[name].data_type != TensorProto.INT64:
                assert weights[name].data_type == wanted, node
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    assert len(casts) == 3  # bytes to float32, to float16, and back


@pytest.mark.parametrize("factor", [3e3, 1e-3])
def test_float16_lengths_neither_overflow_nor_vanish(unit, tmp_path, factor):
    """Squares of such numbers are beyond float16; the numbers are not."""
    model = onnx.load(unit)
    [gemm] = [node for node in model.graph.node if node.op_type == "Gemm"]
    for tensor in model.graph.initializer:
        if tensor.name in gemm.input:
            scaled = numpy_helper.to_array(tensor) * np.float32(factor)
            tensor.CopyFrom(numpy_helper.from_array(scaled, tensor.name))
    scaled = save(model, tmp_path / "scaled.onnx", describe(unit).properties)
    to_fp16(scaled, tmp_path / "half.onnx")
    images, _ = stripes(20)
    right, found = (
        Session(describe(path), "cpu", 1).run(images) for path in (unit, tmp_path / "half.onnx")
    )
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    assert (right * found).sum(1).min() > 0.9999


def test_the_converter_leaves_the_search_path_alone(half):
    assert not [entry for entry in sys.path if "onnxruntime" in entry]


# int8


def test_int8_is_a_quarter_of_the_file_and_retrieves_alike(embedder, exported, eighth):
    assert eighth.stat().st_size < 0.35 * exported.stat().st_size
    images, labels = stripes(400, seed=2)
    found = parity.check(embedder, Session(describe(eighth), "cpu", 1).run, images, labels)
    assert 1e-3 < found["max_rel"] < 0.2
    assert found["agreement"] > 0.85
    assert abs(found["recall_torch"] - found["recall_onnx"]) <= 0.01


def test_int8_weights_have_a_scale_per_channel_and_seven_bits(eighth):
    model = onnx.load(eighth)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    maker = {name: node for node in model.graph.node for name in node.output}
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 4
    for node in convolutions:
        activation, weight = (maker[name] for name in node.input[:2])
        assert activation.op_type == weight.op_type == "DequantizeLinear"
        assert weights[activation.input[2]].dtype == np.uint8
        values, scale = (weights[name] for name in weight.input[:2])
        assert values.dtype == np.int8
        assert 60 <= np.abs(values.astype(int)).max() <= 64
        assert scale.shape == (len(values),)


def test_int8_spares_pixels_and_the_embedding(eighth):
    model = onnx.load(eighth)
    assert kinds(head(model)) == ["Transpose", "Cast", "Div", "Sub", "Div"]
    assert kinds(last(model)) == ["Gemm", "Reshape", "AveragePool"]
    weights = {t.name: t.data_type for t in model.graph.initializer}
    for node in (*head(model), *last(model)):
        assert all(weights.get(name, 1) in (1, 7) for name in node.input), node


def test_int8_takes_pixels_from_black_to_white(eighth):
    """The first scale covers them, to half a step."""
    model = onnx.load(eighth)
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    first = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    scale, zero = (float(weights[name]) for name in first.input[1:3])
    assert (0 - zero) * scale == pytest.approx(-1, abs=0.02)  # (0 - 0.5) / 0.5
    assert (255 - zero) * scale == pytest.approx(1, abs=0.02)


def test_metadata_stays_and_tells_the_precision(exported, tmp_path, half, eighth):
    was = describe(exported).properties
    for path, precision in ((half, "fp16"), (eighth, "int8")):
        now = dict(describe(path).properties)
        how = json.loads(now.pop("dmltool.quantization"))
        assert now == was | {"dmltool.precision": precision}
        assert how.get("calibration_images") == (64 if precision == "int8" else None)
    plain = describe(exported)
    properties = plain.properties | {"dmltool.parity": "{}"}
    source = save(plain.load(), tmp_path / "checked.onnx", properties)
    made = to_fp16(source, tmp_path / "half.onnx")  # the parity of another model
    assert "dmltool.parity" not in made.properties


def test_conversions_are_silent_and_tell_progress(exported, tmp_path, capfd):
    handlers, told = list(logging.getLogger().handlers), []
    to_fp16(describe(exported), tmp_path / "a.onnx")
    heard = lambda *a: told.append(a)  # noqa: E731
    to_int8(describe(exported), tmp_path / "b.onnx", pictures(16), heard)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == handlers
    assert logging.root.manager.disable == logging.NOTSET
    assert told == [("calibrating", 0, 16), ("calibrating", 8, 16)]


def test_int8_needs_images(exported, tmp_path):
    target = tmp_path / "int8.onnx"
    with pytest.raises(DmlError, match="no images to calibrate"):
        to_int8(describe(exported), target, pictures(0))
    assert not target.exists()


# Side by side


def test_precisions_are_compared_on_the_same_images(embedder, exported, half, eighth):
    images, labels = stripes()
    models = {"fp32": exported, "fp16": half, "int8": eighth}
    described = {name: describe(path) for name, path in models.items()}
    rows = compare(described, images, labels, provider="cpu", batch_size=32)
    assert [row["precision"] for row in rows] == list(models)
    assert [row["bytes"] for row in rows] == [path.stat().st_size for path in models.values()]
    assert all(row["images_per_second"] > 0 for row in rows)
    assert rows[0]["changed"] == 0
    assert rows[2]["changed"] > 0
    recall, nearest = parity.retrieved(parity.torch_runner(embedder)(images), labels)
    assert rows[0]["recall"] == recall
    other = parity.retrieved(Session(describe(eighth), "cpu", 1).run(images), labels)[1]
    assert rows[2]["changed"] == (nearest != other).mean()
