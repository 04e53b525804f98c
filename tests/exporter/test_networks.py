"""Networks of checkpoints and models of earlier exports; several networks as one."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from exporter import parity
from exporter.exporting import EMBEDDINGS, MODEL, Settings, export
from exporter.networks import Member, Together, check_same_images
from exporter.onnx.metadata import describe_ensemble, to_properties
from exporter.onnx.model import describe
from exporter.onnx.precision import tail, to_fp16, to_int8
from exporter.onnx.session import Session
from exporter.onnx.trace import write_model
from retrieval.errors import DmlError
from tests.commands import call
from tests.exporter.networks import described, settled, stripes
from trainer.config import Config
from trainer.run import checkpoint


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


def embedded(model, images):
    return Session(model, "cpu", 1).run(images)


def unit_rows(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_an_ensemble_is_the_unit_embeddings_side_by_side_for_any_batch(members, both):
    for count in (1, 5):
        images, _ = stripes(count)
        right = np.hstack([unit_rows(parity.torch_runner(member)(images)) for member in members])
        assert right.shape == (count, 24)
        np.testing.assert_allclose(embedded(both, images), right, atol=5e-6)


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
        found, right = embedded(model, images), embedded(both, images)
        for part in (slice(0, 16), slice(16, 24)):
            np.testing.assert_allclose(np.linalg.norm(found[:, part], axis=1), 1, rtol=1e-5)
        assert ((found * right).sum(1) / 2).min() > 1 - tolerance
        spared = {node.op_type for node in tail(onnx.load(model.path))}
        assert spared == {"Clip", "Concat", "Div", "Expand", "ReduceL2"}
    assert len(np.unique(embedded(eighth, images))) > 1000  # not 256 steps
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


def test_a_data_set_that_has_changed_is_refused(trained, run, tmp_path):
    pictures = Path(shutil.copytree(trained / "pictures", tmp_path / "pictures"))
    assert call("export", run, "--data", pictures, "--no-embeddings").exit_code == 0
    for folder in sorted(pictures.iterdir()):
        folder.rename(folder.with_name(f"new {folder.name}"))
    done = call("export", run, "--data", pictures, "--force")
    assert done.exit_code == 1
    assert "is not the one" in done.stderr


@pytest.mark.parametrize("option", ["--no-onnx", "--resume"])
def test_rows_are_not_computed_with_the_model_of_another_run(option, trained, run, tmp_path):
    export([trained / "run1"], tmp_path / "other", Settings(embeddings=False))
    shutil.copy(tmp_path / "other" / MODEL, run)
    done = call("export", run, option)
    assert done.exit_code == 1
    assert "is not the model of" in done.stderr
    assert not (run / EMBEDDINGS).exists()


def test_an_ensemble_is_not_resumed_with_the_model_of_other_runs(trained, tmp_path):
    runs = [trained / "run0", trained / "run1"]
    export(runs, tmp_path, Settings(embeddings=False))
    with pytest.raises(DmlError, match="is not the model of"):
        export(runs[::-1], tmp_path, Settings(resume=True))
    with pytest.raises(DmlError, match="is not the model of") as caught:
        export(runs, tmp_path, Settings(resume=True, precision="fp16", input="float-nchw"))
    assert "--precision" in caught.value.why
    assert "--input" in caught.value.why
    (tmp_path / ".export-killed").mkdir()  # as a kill right after the renaming leaves it
    (tmp_path / ".export-killed" / "lock").touch()
    again = export(runs, tmp_path, Settings(resume=True))
    assert not (tmp_path / ".export-killed").exists()
    assert again["embeddings"]["computed"] == 24
    assert again["model"]["precisions"]  # as found when the model was made


def test_a_run_without_its_best_network_names_the_last_one(run):
    (run / checkpoint.BEST).unlink()
    done = call("export", run)
    assert done.exit_code == 1
    assert "is not finished, or the file was removed" in done.stderr
    assert f"dmltool export {run / checkpoint.LAST}" in done.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read as a checkpoint"),
        (b"PK\x03\x04 half a file", "cannot be read as a checkpoint"),
        ({"weights": 1}, "is not a checkpoint of dmltool"),
        ({"format": "dmltool-checkpoint", "version": 99}, "version 99"),
        ({"format": "dmltool-checkpoint", "version": 1}, "is damaged"),
    ],
)
def test_what_is_no_checkpoint_is_refused(content, told, tmp_path):
    path = tmp_path / "best.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    done = call("export", path)
    assert done.exit_code == 1
    assert told in done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"best.pt"}


def test_a_checkpoint_with_other_keys_is_refused(run):
    state = checkpoint.load(run / "best.pt")
    state["embedder"]["extra.weight"] = torch.zeros(3)
    del state["embedder"]["projection.bias"]
    torch.save(state, run / "best.pt")
    done = call("export", run)
    assert done.exit_code == 1
    assert "do not fit its network" in done.stderr
    assert "extra.weight" in done.stderr


def test_a_checkpoint_may_leave_things_to_defaults_and_hold_odd_ones(run):
    state = checkpoint.load(run / "best.pt")
    del state["config"]["loss"]["name"]
    state["versions"]["torch"] = torch.zeros(1)
    torch.save(state, run / "best.pt")
    done = call("export", run, "--no-embeddings")
    assert done.exit_code == 0, done.output
    assert describe(run / MODEL).metadata.loss == "ce"
    del state["config"]["network"]
    torch.save(state, run / "best.pt")
    done = call("export", run, "--no-embeddings", "--force")
    assert done.exit_code == 1
    assert "lacks network" in done.stderr


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    torch.save({"format": "dmltool-checkpoint", "bomb": Bomb()}, tmp_path / "best.pt")
    done = call("export", tmp_path)
    assert done.exit_code == 1
    assert "code in it is never run" in done.stderr
    assert not (tmp_path / "executed").exists()
