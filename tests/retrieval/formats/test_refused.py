"""What is not read is named, with a line that converts it; the lines are run here."""

import json
import os
import pickle
import zipfile
from unittest.mock import Mock

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io

from retrieval.formats.refused import missing
from retrieval.loading.load import load
from tests.retrieval.formats.samples import BIG_X, BIG_Y, X, follow, refused, run_fix


@pytest.mark.parametrize("name", ["x.pkl", "x.pickle", "it's 1.pkl"])
def test_pickles_are_named_and_the_line_converts_them(tmp_path, name):
    table = pd.DataFrame({"vec": list(BIG_X), "label": BIG_Y})
    for content, suffix in ((table, ".parquet"), ({"x": BIG_X, "y": BIG_Y}, ".npz")):
        (tmp_path / name).write_bytes(pickle.dumps(content))
        error = refused(tmp_path / name, "Python pickle")
        assert "any code" in error.why
        follow(error, tmp_path)
        found = load((tmp_path / name).with_suffix(suffix)).splits["test"]
        np.testing.assert_array_equal(found.vectors, BIG_X)
        np.testing.assert_array_equal(found.labels, BIG_Y)
    (tmp_path / "x.joblib").write_bytes(pickle.dumps(BIG_X))
    follow(refused(tmp_path / "x.joblib", "Python pickle"), tmp_path)
    np.testing.assert_array_equal(load(tmp_path / "x.npy").splits["test"].vectors, BIG_X)


@pytest.mark.parametrize("version", ["5", "7.3"])
def test_matlab_files_are_named_and_the_line_converts_them(tmp_path, version):
    if version == "5":
        scipy.io.savemat(tmp_path / "x.mat", {"x": BIG_X, "y": BIG_Y})
    else:
        with h5py.File(tmp_path / "x.mat", "w", userblock_size=512) as file:
            file["x"], file["y"] = BIG_X.T, BIG_Y[None].T
        with (tmp_path / "x.mat").open("r+b") as file:
            file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64")
    follow(refused(tmp_path / "x.mat", "MATLAB file"), tmp_path)
    found = load(tmp_path / "x.npz").splits["test"]
    np.testing.assert_array_equal(found.vectors, BIG_X)
    np.testing.assert_array_equal(found.labels, BIG_Y)


def test_spreadsheets_models_and_archives_are_named(tmp_path):
    (tmp_path / "x.xlsx").write_bytes(b"PK\3\4 and so on")
    assert "read_excel" in refused(tmp_path / "x.xlsx", "spreadsheet").fix
    (tmp_path / "x.onnx").write_bytes(b"\x08\x08")
    assert "dmltool embed" in refused(tmp_path / "x.onnx", "ONNX model").fix
    (tmp_path / "x.npy.xz").write_bytes(b"\xfd7zXZ")
    refused(tmp_path / "x.npy.xz", "compressed")


def test_a_folder_of_a_hugging_face_model_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "optimum-cli" in refused(tmp_path, "Hugging Face model").fix


def test_other_folders_are_named(tmp_path):
    run, images, one = tmp_path / "run", tmp_path / "photos", tmp_path / "one"
    for folder in (run, images / "mug", one, tmp_path / "empty"):
        folder.mkdir(parents=True)
    (run / "config.toml").write_text("")
    assert refused(run, "a run without embeddings").fix == f"Export it: dmltool export {run}"
    (run / "curves.png").write_bytes(b"x")
    assert refused(tmp_path, "a folder of runs").fix == f"Export one: dmltool export {run}"
    other = tmp_path / "with embeddings"
    other.mkdir()
    (other / "config.toml").write_text("")
    (other / "embeddings.h5").write_bytes(b"x")
    assert refused(tmp_path, "a folder of runs").fix == f"Choose one: '{other}'"
    (images / "mug" / "1.jpg").write_bytes(b"x")
    assert "dmltool embed" in refused(images, "folder of images").fix
    (one / "readme.md").write_text("x")
    assert "readme.md" in refused(one, "is a folder without embedding files").why
    assert "empty" in refused(tmp_path / "empty", "is a folder without embedding files").why


def test_a_zipped_table_is_told_with_what_is_inside(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.csv.zip", "w") as archive:
        archive.writestr("x.csv", "a,b,label\n1,2,x\n")
    error = refused(tmp_path / "x.csv.zip", "is a zip archive")
    assert "x.csv" in error.why
    assert "unzip" in error.fix
    np.savez(tmp_path / "y.npz", embeddings=BIG_X, labels=BIG_Y)
    (tmp_path / "y.npz").rename(tmp_path / "y.zip")
    np.testing.assert_array_equal(load(tmp_path / "y.zip").splits["test"].vectors, BIG_X)


def test_json_records_are_told_and_the_line_converts_them(tmp_path):
    rows = [{"embedding": x.tolist(), "label": int(y)} for x, y in zip(BIG_X, BIG_Y, strict=True)]
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=2))
    error = refused(tmp_path / "x.json", "a list of JSON objects")
    np.save(tmp_path / "x.npy", BIG_X)
    refused(tmp_path / "x.npy", "a list of JSON objects", labels=tmp_path / "x.json")
    run_fix(error, tmp_path)
    found = load(tmp_path / "x.jsonl").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(np.float32), BIG_X)


@pytest.mark.parametrize("name", ["", "::key"])
def test_an_empty_name_is_told(name):
    refused(name, "name of a file is empty")


def test_files_that_were_never_downloaded_are_told(tmp_path):
    (tmp_path / "x.npy").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    assert "git lfs pull" in refused(tmp_path / "x.npy", "pointer of Git LFS").fix
    (tmp_path / "x.csv").write_text("\n<!DOCTYPE html><html>404</html>")
    refused(tmp_path / "x.csv", "is a web page")


def test_files_that_export_would_write_name_it(tmp_path):
    (tmp_path / "config.toml").touch()
    for name in ("embeddings.h5", "model.onnx"):
        error = missing(tmp_path / name)
        assert error.fix == f"Export the run: dmltool export {tmp_path}"


def test_a_missing_file_in_a_folder_that_may_not_be_listed_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", Mock(side_effect=PermissionError))
    assert missing(tmp_path / "x.npy").fix == f"Look there: ls {tmp_path}"


def test_a_link_that_leads_nowhere_is_told(tmp_path):
    (tmp_path / "x.npy").symlink_to("gone.npy")
    assert "gone.npy" in refused(tmp_path / "x.npy", "leads to no file").why


@pytest.mark.usefixtures("tried")
def test_things_that_are_not_files_are_errors(tmp_path):
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "folder.h5" / "inside.md").write_text("x")
    assert "inside.md" in refused(tmp_path / "folder.h5", "is a folder").why
    os.mkfifo(tmp_path / "pipe.npy")
    refused(tmp_path / "pipe.npy", "not a regular file")
    np.save(tmp_path / "embeddings.npy", X)
    assert "embeddings.npy" in refused(tmp_path / "embedings.npy", "does not exist").fix
    refused(tmp_path / "nowhere" / "x.npy", "folder .*nowhere does not exist either")
    assert f"ls {tmp_path}" in refused(tmp_path / "nowhere" / "x.npy", "does not exist").fix
    file = tmp_path / "embeddings.npy"
    assert refused(file / "x.npy", "does not exist").why == f"{file} is not a folder."
    folder = tmp_path / "features"
    folder.mkdir()
    np.save(folder / "x.npy", X)
    near = refused(tmp_path / "featurs" / "x.npy", "does not exist").fix
    assert near == f"Did you mean {folder / 'x.npy'}?"
    refused("x\0.npy", "does not exist|cannot be opened")
    refused("no\0where/x.npy", "does not exist|cannot be opened")
    (tmp_path / "x.cvs").write_text("hello")
    error = refused(tmp_path / "x.cvs", "suffix .cvs")
    assert ".safetensors" in error.why
    assert ".csv" in error.fix
    (tmp_path / "y.txt").write_text("1")
    refused(tmp_path / "y.txt", "labels only")
