"""`inspect model.onnx`: what a model says of itself, checked again on request."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from exporter.exporting import MODEL, Settings, export
from exporter.inspection import check_model, inspect_model
from exporter.networks import load_member, load_training_data
from exporter.onnx import untrusted
from exporter.onnx.model import describe
from retrieval import neighbours
from retrieval.errors import DmlError
from retrieval.ranking.backends.choice import VARIABLE
from tests.commands import call
from tests.exporter.models import FLOAT, PROPERTIES, UINT8, mean_model, model_of
from tests.trainer.small import draw_pictures, small_config
from trainer.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few seconds with its model."""
    folder = tmp_path_factory.mktemp("inspected")
    train.train(small_config(draw_pictures(folder / "pictures", classes=12)), folder / "run")
    export([folder / "run"], None, Settings(embeddings=False))
    return folder / "run"


def save(path, model):
    onnx.save(model, path)
    return path


def test_a_model_shows_what_it_says_of_itself(run):
    done = call("inspect", run / MODEL)
    assert done.exit_code == 0, done.stderr
    told = " ".join(done.stdout.split())
    model = describe(run / MODEL)
    assert " MB, " in told  # of the file; the property of this name is that of the images
    for words in ("IR version", "opset", "precision fp32", "uint8, nhwc, 16 x 16", "interpolation"):
        assert words in told
    for words in ("mean and std are applied by the model", "large JPEGs are decoded smaller"):
        assert words in told
    assert "embeddings scaled to norm 1" in told
    for riddle in (" inside ", " draft ", "length 1"):
        assert riddle not in told
    for words in (model.sha256, model.metadata.checkpoint_sha256, "same nearest neighbour"):
        assert words in told
    assert done.stderr.splitlines()[-1] == f"Next: dmltool inspect {run / MODEL} --check"
    found = json.loads(call("inspect", run / MODEL, "--json").stdout)
    assert found["dmltool"]["parity"] == model.metadata.parity
    assert found["preprocessing"]["crop"] == 16
    assert found["output"]["dim"] == model.dim


def test_given_the_run_the_comparison_of_the_export_is_repeated(run, monkeypatch):
    done = call("inspect", run / MODEL, "--run", run, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found["check"]["passed"].values())
    again, before = found["check"]["parity"], found["dmltool"]["parity"]
    for key in ("images", "recall_torch", "recall_onnx", "agreement"):
        assert again[key] == before[key]
    monkeypatch.setenv(VARIABLE, "torch")
    real, used = neighbours._on, []
    monkeypatch.setattr(neighbours, "_on", lambda devices: used.append(devices) or real(devices))
    done = call("inspect", run / MODEL, "--run", run, "--device", "cpu")
    assert "Checked now" in done.stdout
    assert used == [("cpu",)] * 2  # network and model


def test_an_image_that_became_unreadable_is_left_out_of_the_comparison(tmp_path):
    pictures = draw_pictures(tmp_path / "pictures", classes=12)
    train.train(small_config(pictures), tmp_path / "run")
    export([tmp_path / "run"], None, Settings(embeddings=False))
    data = load_training_data(load_member(tmp_path / "run"), None)
    (data.root / data.paths[int(data.rows("test")[0])]).write_text("<html>404</html>")
    done = call("inspect", tmp_path / "run" / MODEL, "--run", tmp_path / "run", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["check"]["parity"]["images"] == found["dmltool"]["parity"]["images"] - 1


def test_the_device_of_the_comparison_is_that_of_the_options(run, tmp_path):
    for settings, wanted in (
        (Settings(), "auto"),
        (Settings(provider="cpu"), "cpu"),
        (Settings(provider="cpu", device="cuda:1"), "cuda:1"),
    ):
        assert settings.ranking_device == wanted
    done = call("export", run, "--out", tmp_path, "--no-embeddings", "--device", "cuda:99")
    assert done.exit_code == 1
    assert "device cuda:99" in done.stderr
    assert not (tmp_path / MODEL).exists()
    out = tmp_path / "photos.h5"
    done = call("embed", run / MODEL, "glyphs", "--out", out, "--device", "cuda:99")
    assert done.exit_code == 1
    assert "device cuda:99" in done.stderr
    done = call("inspect", run / MODEL, "--run", run, "--device", "cuda:99")
    assert done.exit_code == 1
    assert "device cuda:99" in done.stderr
    assert call("inspect", run / MODEL, "--device", "cpu").exit_code == 2
    file = ("inspect", "x.h5", "--entropy", "--run", run)
    done = call(*file, "--device", "cpu")
    assert done.exit_code == 2
    assert "--device are for models" in done.stderr


def test_a_model_that_was_tampered_with_is_found_out(run, tmp_path):
    """It still says that it came from this run, but its weights are others."""
    proto = onnx.load(run / MODEL)
    largest = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(largest)
    noise = np.random.default_rng(0).standard_normal(values.shape).astype(values.dtype)
    largest.CopyFrom(onnx.numpy_helper.from_array(noise, largest.name))
    path = save(tmp_path / "other.onnx", proto)
    with pytest.raises(DmlError, match=r"Recall@1|does not compute"):
        check_model(describe(path), [run])


def test_a_model_of_another_run_is_not_compared(run, tmp_path):
    path = save(tmp_path / "m.onnx", mean_model(properties=PROPERTIES))
    done = call("inspect", path, "--run", run)
    assert done.exit_code == 1
    assert "is not the model of" in done.stderr
    assert "dmltool export" in done.stderr  # a whole command


def test_a_foreign_model_is_shown_and_checked(tmp_path):
    path = save(tmp_path / "foreign.onnx", mean_model(("batch", 3, 8, 8), FLOAT, axes=(2, 3)))
    done = call("inspect", path, "--check")
    assert done.exit_code == 0, done.stderr
    assert "the file was written by another program" in done.stdout
    assert "same result alone and in a batch" in done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"Next: dmltool embed {path}")


def test_a_checked_model_is_parsed_once(tmp_path, monkeypatch):
    path = save(tmp_path / "foreign.onnx", mean_model(("batch", 3, 8, 8), FLOAT, axes=(2, 3)))
    parsed, parse = [], untrusted.parse
    monkeypatch.setattr(untrusted, "parse", lambda *args: parsed.append(args) or parse(*args))
    assert call("inspect", path, "--check").exit_code == 0
    assert len(parsed) == 1


def test_a_model_that_cannot_embed_is_shown_with_the_reason(tmp_path):
    nodes = [helper.make_node("Cast", ["images"], [name], to=FLOAT) for name in ("a", "b")]
    shape = ["batch", 8, 8, 3]
    outputs = [("a", FLOAT, shape), ("b", FLOAT, shape)]
    path = save(tmp_path / "two.onnx", model_of(nodes, [("images", UINT8, shape)], outputs))
    assert "2 outputs" in inspect_model(path)[0]["problem"]["what"]
    done = call("inspect", path)
    assert done.exit_code == 0
    assert "2 outputs" in done.stdout
    assert call("inspect", path, "--check").exit_code == 1


def batch_mean(properties):
    """The mean colour of each image, less that of its batch."""
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["own"], axes=[1, 2], keepdims=0),
        helper.make_node("ReduceMean", ["own"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["own", "mean"], ["embeddings"]),
    ]
    inputs = [("images", UINT8, ["batch", 8, 8, 3])]
    return model_of(nodes, inputs, [("embeddings", FLOAT, ["batch", 3])], properties)


def constant(properties):
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Sub", ["mean", "mean"], ["embeddings"]),
    ]
    inputs = [("images", UINT8, ["batch", 8, 8, 3])]
    return model_of(nodes, inputs, [("embeddings", FLOAT, ["batch", 3])], properties)


def random(properties):
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("RandomUniformLike", ["mean"], ["embeddings"]),
    ]
    inputs = [("images", UINT8, ["batch", 8, 8, 3])]
    return model_of(nodes, inputs, [("embeddings", FLOAT, ["batch", 3])], properties)


@pytest.mark.parametrize(
    ("make", "failed"),
    [
        (batch_mean, "same result alone and in a batch"),
        (constant, "other images, other embeddings"),
        (random, "same result twice"),
    ],
)
def test_models_that_do_not_embed_soundly_fail_the_check(tmp_path, make, failed):
    path = save(tmp_path / "m.onnx", make(PROPERTIES))
    assert not check_model(describe(path))["passed"][failed]
    done = call("inspect", path, "--check")
    assert done.exit_code == 1
    assert "NO" in done.stdout


def test_inspecting_a_model_loads_no_torch_and_no_h5py(tmp_path):
    import subprocess
    import sys

    path = save(tmp_path / "m.onnx", mean_model(properties=PROPERTIES))
    code = (
        "import sys\nfrom pathlib import Path\nfrom exporter.inspection import check_model\n"
        "from exporter.onnx.model import describe\n"
        f"check_model(describe(Path({str(path)!r})))\n"
        f"sys.exit(bool({{'torch', 'h5py'}} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_the_next_step_for_a_foreign_model_names_what_it_does_not_say(tmp_path):
    path = save(tmp_path / "net.onnx", mean_model(("batch", 3, 8, 8), FLOAT, axes=(2, 3)))
    done = call("inspect", path, "--check")
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1].endswith("--mean R,G,B --std R,G,B")
    assert re.search(r"size +\d+ B, \d+ nodes", done.stdout)
