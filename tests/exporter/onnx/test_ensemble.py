"""Ensembles: the embeddings of several models, each of length 1, side by side."""

import json
import os

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from exporter.onnx import ensemble
from exporter.onnx.ensemble import write_ensemble
from exporter.onnx.nodes import tail
from exporter.onnx.precision import to_fp16, to_int8
from exporter.onnx.session import Session, describe
from exporter.onnx.trace import add_properties, save
from retrieval.errors import DmlError
from tests.exporter.models import mean_model
from tests.exporter.networks import stripes


def changed(source, target, change):
    model = onnx.load(source)
    change(model)
    save(model, target)
    return target


@pytest.fixture(scope="module")
def other(exported, tmp_path_factory):
    """Another network: its projection goes elsewhere, and has half the length."""

    def turn(model):
        [gemm] = [node for node in model.graph.node if node.op_type == "Gemm"]
        for tensor in model.graph.initializer:
            if tensor.name in gemm.input:
                rows = np.random.default_rng(0).permuted(numpy_helper.to_array(tensor), axis=-1)
                tensor.CopyFrom(numpy_helper.from_array(rows[:8].copy(), tensor.name))
        dims = model.graph.output[0].type.tensor_type.shape.dim
        dims[1].dim_value = 8
        del model.graph.value_info[:]

    path = changed(exported, tmp_path_factory.mktemp("other") / "other.onnx", turn)
    add_properties(path, {"dmltool.embedding_dim": "8", "dmltool.arch": "othercnn"})
    return path


def run(path, images):
    return Session(describe(path), "cpu", 1).run(images)


def unit_rows(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_an_ensemble_is_the_unit_embeddings_side_by_side_for_any_batch(exported, other, tmp_path):
    target = tmp_path / "both.onnx"
    write_ensemble([exported, other], target)
    for count in (1, 5):
        images, _ = stripes(count)
        right = np.hstack([unit_rows(run(path, images)) for path in (exported, other)])
        assert right.shape == (count, 24)
        np.testing.assert_allclose(run(target, images), right, atol=1e-6)


def test_an_ensemble_says_what_it_is_made_of(exported, other, tmp_path):
    target = tmp_path / "both.onnx"
    write_ensemble([exported, other], target)
    model = describe(target)
    assert (model.batch, model.dim, model.size) == (None, 24, (16, 16))
    assert model.preprocessing == describe(exported).preprocessing
    assert model.metadata.arch == "smallcnn + othercnn"
    assert not model.metadata.normalized
    members = json.loads(model.properties["dmltool.ensemble"])
    assert [member["embedding_dim"] for member in members] == [16, 8]
    assert [member["model_sha256"] for member in members] == [
        describe(path).sha256 for path in (exported, other)
    ]
    write_ensemble([exported, other], tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == target.read_bytes()


def test_members_may_have_length_1_already_be_float16_or_ensembles(exported, other, tmp_path):
    images, _ = stripes(4)
    to_fp16(other, tmp_path / "half.onnx")
    write_ensemble([exported, tmp_path / "half.onnx"], tmp_path / "two.onnx")
    write_ensemble([tmp_path / "two.onnx", exported], tmp_path / "three.onnx")
    two, three = (run(tmp_path / f"{name}.onnx", images) for name in ("two", "three"))
    assert describe(tmp_path / "two.onnx").metadata.precision == "fp32 + fp16"
    right = np.hstack([two / np.sqrt(2), unit_rows(run(exported, images))])
    np.testing.assert_allclose(three, right, atol=1e-6)


def test_an_ensemble_can_be_float16_or_int8_and_keeps_its_lengths(exported, other, tmp_path):
    plain, half, eighth = (tmp_path / f"{name}.onnx" for name in ("fp32", "fp16", "int8"))
    write_ensemble([exported, other], plain)
    to_fp16(plain, half)
    images, _ = stripes(64, seed=1)
    to_int8(plain, eighth, iter([images]))
    for path, tolerance in ((half, 1e-5), (eighth, 0.02)):
        found, right = run(path, images), run(plain, images)
        for part in (slice(0, 16), slice(16, 24)):
            np.testing.assert_allclose(np.linalg.norm(found[:, part], axis=1), 1, rtol=1e-5)
        assert ((found * right).sum(1) / 2).min() > 1 - tolerance
        spared = {node.op_type for node in tail(onnx.load(path))}
        assert spared == {"Concat", "Div", "Max", "ReduceL2"}
    assert len(np.unique(run(eighth, images))) > 1000  # not 256 steps


def test_every_model_carries_the_lowest_ir_version_of_its_opset(exported, other, tmp_path):
    both, half, small = (tmp_path / name for name in ("both.onnx", "half.onnx", "small.onnx"))
    write_ensemble([exported, other], both)
    to_fp16(both, half)
    to_int8(both, small, [stripes(16)[0]])
    for path in (exported, both, half, small):
        model = onnx.load(path)
        assert [o.version for o in model.opset_import if not o.domain] == [18]
        assert model.ir_version == 8, path  # ONNX Runtime 1.15 reads it; 1.17 refuses 10


def test_an_embedding_of_zeros_stays_zeros(exported, tmp_path):
    def vanish(model):
        [gemm] = [node for node in model.graph.node if node.op_type == "Gemm"]
        for tensor in model.graph.initializer:
            if tensor.name in gemm.input:
                nothing = np.zeros_like(numpy_helper.to_array(tensor))
                tensor.CopyFrom(numpy_helper.from_array(nothing, tensor.name))

    zero = changed(exported, tmp_path / "zero.onnx", vanish)
    write_ensemble([zero, exported], tmp_path / "both.onnx")
    found = run(tmp_path / "both.onnx", stripes(3)[0])
    assert (found[:, :16] == 0).all()
    np.testing.assert_allclose(np.linalg.norm(found[:, 16:], axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("resize", "20", "resize: 0 in"), ("interpolation", "bicubic", "bicubic in")],
)
def test_other_preprocessing_is_refused_and_named(exported, other, tmp_path, key, value, said):
    path = changed(other, tmp_path / "other.onnx", lambda model: None)
    add_properties(path, {f"dmltool.{key}": value})
    with pytest.raises(DmlError, match="want different images") as caught:
        write_ensemble([exported, path], tmp_path / "both.onnx")
    assert said in caught.value.why
    assert "dmltool merge" in caught.value.fix
    assert not (tmp_path / "both.onnx").exists()


def test_another_form_of_input_is_refused(exported, unit, tmp_path):
    with pytest.raises(DmlError, match="want different images") as caught:
        write_ensemble([exported, unit], tmp_path / "both.onnx")
    assert "input type: uint8 in" in caught.value.why


def test_another_mean_and_std_are_inside_and_may_differ(exported, other, tmp_path):
    path = changed(other, tmp_path / "other.onnx", lambda model: None)
    add_properties(path, {"dmltool.mean": "[0.1, 0.2, 0.3]"})
    write_ensemble([exported, path], tmp_path / "both.onnx")
    members = json.loads(describe(tmp_path / "both.onnx").properties["dmltool.ensemble"])
    assert [member["mean"] for member in members] == [[0.5, 0.5, 0.5], [0.1, 0.2, 0.3]]


def test_what_cannot_be_joined_is_told(exported, tmp_path, monkeypatch):
    target = tmp_path / "both.onnx"
    with pytest.raises(DmlError, match="An ensemble of 1 model is none"):
        write_ensemble([exported], target)
    foreign = tmp_path / "foreign.onnx"
    onnx.save(mean_model(), foreign)
    with pytest.raises(DmlError, match="does not say how images are prepared"):
        write_ensemble([exported, foreign], target)

    def newer(model):
        model.opset_import[0].version += 1

    with pytest.raises(DmlError, match="different versions of ONNX's operators"):
        write_ensemble([exported, changed(exported, tmp_path / "new.onnx", newer)], target)
    monkeypatch.setattr(ensemble, "LARGEST", 10)
    with pytest.raises(DmlError, match="too large for one ONNX file"):
        write_ensemble([exported, exported], target)
    assert sorted(os.listdir(tmp_path)) == ["foreign.onnx", "new.onnx"]
