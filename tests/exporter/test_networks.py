"""Several networks as one: the embeddings of its members, each of length 1, side by side."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch

from exporter import parity
from exporter.networks import Member, Together, check_same_images
from exporter.onnx.metadata import describe_ensemble, to_properties
from exporter.onnx.precision import tail, to_fp16, to_int8
from exporter.onnx.session import Session
from exporter.onnx.trace import write_model
from retrieval.errors import DmlError
from tests.exporter.networks import described, settled, stripes
from trainer.config import Config


@pytest.fixture(scope="module")
def members(embedder):
    """A network, and another one with other weights, fewer dimensions and another mean."""
    other = settled(seed=1, dim=8)
    other.pixel_mean.fill_(0.25)
    return [embedder, other]


@pytest.fixture(scope="module")
def both(members, tmp_path_factory):
    """The model of an ensemble, written once."""
    said = [
        described(member, loss=loss, dataset="toy", checkpoint_sha256=loss, arch=f"{loss}cnn")
        for member, loss in zip(members, ("ce", "spce"), strict=True)
    ]
    path = tmp_path_factory.mktemp("both") / "both.onnx"
    properties = to_properties(describe_ensemble(said))
    return write_model(Together(members), path, size=16, properties=properties)


def run(model, images):
    return Session(model, "cpu", 1).run(images)


def unit_rows(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_an_ensemble_is_the_unit_embeddings_side_by_side_for_any_batch(members, both):
    for count in (1, 5):
        images, _ = stripes(count)
        right = np.hstack([unit_rows(parity.torch_runner(member)(images)) for member in members])
        assert right.shape == (count, 24)
        np.testing.assert_allclose(run(both, images), right, atol=5e-6)


def test_normalized_ensembles_and_networks_have_length_1(members):
    images, _ = stripes(5)
    for count in (1, 2):
        plain, unit = (
            parity.torch_runner(Together(members[:count], normalize))(images)
            for normalize in (False, True)
        )
        np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
        np.testing.assert_allclose(unit, unit_rows(plain), atol=1e-6)
    alone = parity.torch_runner(Together(members[:1]))(images)
    np.testing.assert_array_equal(alone, parity.torch_runner(members[0])(images))


def test_an_ensemble_says_what_it_is_made_of(members, both):
    assert (both.batch, both.dim, both.size) == (None, 24, (16, 16))
    assert both.preprocessing.mean == (0.5, 0.5, 0.5)
    own = both.metadata
    assert (own.arch, own.loss, own.dataset) == ("cecnn + spcecnn", "ce + spce", "toy")
    assert not own.normalized
    assert own.checkpoints() == ["ce", "spce"]
    parts = json.loads(both.properties["dmltool.ensemble"])
    assert [part["embedding_dim"] for part in parts] == [16, 8]
    assert [part["mean"] for part in parts] == [[0.5] * 3, [0.25] * 3]


def test_an_ensemble_can_be_float16_or_int8_and_keeps_its_lengths(both, tmp_path):
    images, _ = stripes(64, seed=1)
    half = to_fp16(both, tmp_path / "fp16.onnx")
    eighth = to_int8(both, tmp_path / "int8.onnx", images)
    for model, tolerance in ((half, 1e-5), (eighth, 0.02)):
        found, right = run(model, images), run(both, images)
        for part in (slice(0, 16), slice(16, 24)):
            np.testing.assert_allclose(np.linalg.norm(found[:, part], axis=1), 1, rtol=1e-5)
        assert ((found * right).sum(1) / 2).min() > 1 - tolerance
        spared = {node.op_type for node in tail(onnx.load(model.path))}
        assert spared == {"Clip", "Concat", "Div", "Expand", "ReduceL2"}
    assert len(np.unique(run(eighth, images))) > 1000  # not 256 steps
    for model in (both, half, eighth):
        proto = onnx.load(model.path)
        assert [o.version for o in proto.opset_import if not o.domain] == [18]
        assert proto.ir_version == 8, model.path  # ONNX Runtime 1.15 reads it; 1.17 refuses 10


def test_an_embedding_of_zeros_stays_zeros(members):
    zero = settled()
    with torch.no_grad():
        zero.projection.weight.zero_()
        zero.projection.bias.zero_()
    found = parity.torch_runner(Together([zero, members[1]]))(stripes(3)[0])
    assert (found[:, :16] == 0).all()
    np.testing.assert_allclose(np.linalg.norm(found[:, 16:], axis=1), 1, rtol=1e-6)


def member(tmp_path, name, embedder, **changes):
    prepared = {"resize": 0, "keep_ratio": True, "crop": 16, "interpolation": "bilinear"}
    state = {
        "label_names": ["a", "b"],
        "preprocessing": prepared | embedder.preprocessing | changes,
    }
    return Member(tmp_path / name, name, state, Config(), embedder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"resize": 20}, "resize: 0 in"),
        ({"interpolation": "bicubic"}, "bicubic in"),
        ({"crop": 24}, "image size: 16 in"),
    ],
)
def test_members_that_prepare_images_differently_are_refused(members, tmp_path, change, told):
    first, alike, other = (
        member(tmp_path, name, embedder, **changes)
        for name, embedder, changes in (
            ("a.pt", members[0], {}),
            ("b.pt", members[1], {}),
            ("c.pt", members[1], change),
        )
    )
    check_same_images([first, alike])  # each member applies its own mean
    with pytest.raises(DmlError, match="differently prepared images") as caught:
        check_same_images([first, alike, other])
    assert told in caught.value.why
    assert "dmltool merge" in caught.value.fix


def test_members_of_other_classes_are_refused(members, tmp_path):
    first, other = (member(tmp_path, name, members[0]) for name in ("a.pt", "b.pt"))
    other = replace(other, state=other.state | {"label_names": ["a", "c"]})
    with pytest.raises(DmlError, match="different classes"):
        check_same_images([first, other])
