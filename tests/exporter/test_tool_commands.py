"""The command inspect as a user meets it. test_doctor.py and test_demo.py have the other tools."""

import json

import numpy as np
import pytest

from tests.commands import X, Y, call


def test_inspect_tells_what_is_inside(files):
    result = call("inspect", files / "a.h5")
    for word in ("60", "float32", "no", "class", "model"):
        assert word in result.stdout
    parsed = json.loads(call("inspect", files / "shop.h5", "--json").stdout)
    assert parsed["splits"]["gallery"]["rows"] == 40
    assert parsed["splits"]["query"]["labels"]["classes"] == 6


@pytest.mark.parametrize(
    "given",
    [
        ("a.h5", "--run", "x"),
        ("a.h5", "--entropy", "--run=x", "--run=y"),
        ("model.onnx", "--labels", "x.txt"),
        ("model.onnx", "--check", "--data", "photos"),
        ("model.onnx", "--check", "--device", "cpu"),
    ],
)
def test_inspect_refuses_options_that_it_has_no_use_for(files, given):
    assert call("inspect", files / given[0], *given[1:]).exit_code == 2


def test_labels_that_look_like_markup_are_shown_as_text(tmp_path, clustered):
    X, labels = clustered
    np.savez(
        tmp_path / "[red]x.npz", embeddings=X, labels=np.char.add("[bold]", labels.astype(str))
    )
    result = call("inspect", tmp_path / "[red]x.npz")
    assert "[red]x.npz" in result.stdout.replace("\n", "")
    assert result.exit_code == 0


def test_inspect_says_which_arrays_it_took(tmp_path, table):
    np.savez(tmp_path / "x.npz", query_x=X, query_y=Y, gallery_x=X, gallery_y=Y)
    found = call("inspect", tmp_path / "x.npz")
    lines = [line.split() for line in found.stdout.splitlines()]
    assert ["vectors", "from", "query_x", "gallery_x"] in lines
    assert ["labels", "from", "query_y", "gallery_y"] in lines
    result = json.loads(call("inspect", table, "--json").stdout)
    assert result["splits"]["test"]["taken"]["vectors"] == "d0 ... d4, 5 columns"
    assert result["notes"] == [f"{table}: not used: width"]


def test_run_of_an_embedding_file_needs_entropy(tmp_path):
    file = tmp_path / "ok.npz"
    np.savez(file, embeddings=np.eye(3, dtype=np.float32), labels=[0, 0, 1])
    result = call("inspect", file, "--run", tmp_path)
    assert result.exit_code == 2
    assert "add --entropy" in result.output


def test_checks_are_of_models_only(tmp_path):
    np.save(tmp_path / "x.npy", np.eye(3))
    assert call("inspect", tmp_path / "x.npy", "--check").exit_code == 2
    missing = call("inspect", tmp_path / "nope.onnx")
    assert missing.exit_code == 1
    assert "nope.onnx" in missing.stderr
