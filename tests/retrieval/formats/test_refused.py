"""What is not read is named, with a line that converts it; the lines are run here."""

import gzip
import json
import pickle
import shlex
import subprocess
import sys
import zipfile

import faiss
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import torch

from retrieval.errors import DmlError
from retrieval.loading import load
from tests.forks import Forked
from trainer.run.checkpoint import FORMAT

X = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
Y = np.arange(40) // 4


def refused(source, match, **options):
    with pytest.raises(DmlError, match=match) as error:
        load(source, **options)
    assert error.value.what.endswith(".")
    assert error.value.fix
    return error.value


def follow(error, folder):
    """Runs the line that the error advises."""
    words = shlex.split(error.fix[error.fix.index("python -c") :])
    ended, _, errors = Forked(*words[1:], cwd=folder).end(timeout=120)
    assert ended == 0, errors


@pytest.mark.parametrize("name", ["x.pkl", "x.pickle", "it's 1.pkl"])
def test_pickles_are_named_and_the_line_converts_them(tmp_path, name):
    table = pd.DataFrame({"vec": list(X), "label": Y})
    for content, suffix in ((table, ".parquet"), ({"x": X, "y": Y}, ".npz")):
        (tmp_path / name).write_bytes(pickle.dumps(content))
        error = refused(tmp_path / name, "Python pickle")
        assert "any code" in error.why
        follow(error, tmp_path)
        found = load((tmp_path / name).with_suffix(suffix)).splits["test"]
        np.testing.assert_array_equal(found.vectors, X)
        np.testing.assert_array_equal(found.labels, Y)
    (tmp_path / "x.joblib").write_bytes(pickle.dumps(X))
    follow(refused(tmp_path / "x.joblib", "Python pickle"), tmp_path)
    np.testing.assert_array_equal(load(tmp_path / "x.npy").splits["test"].vectors, X)


@pytest.mark.parametrize("version", ["5", "7.3"])
def test_matlab_files_are_named_and_the_line_converts_them(tmp_path, version):
    if version == "5":
        scipy.io.savemat(tmp_path / "x.mat", {"x": X, "y": Y})
    else:
        with h5py.File(tmp_path / "x.mat", "w", userblock_size=512) as file:
            file["x"], file["y"] = X.T, Y[None].T
        with (tmp_path / "x.mat").open("r+b") as file:
            file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64")
    follow(refused(tmp_path / "x.mat", "MATLAB file"), tmp_path)
    found = load(tmp_path / "x.npz").splits["test"]
    np.testing.assert_array_equal(found.vectors, X)
    np.testing.assert_array_equal(found.labels, Y)


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
    assert refused(tmp_path, "a folder of runs").fix == f"Choose one: dmltool eval '{other}'"
    (images / "mug" / "1.jpg").write_bytes(b"x")
    assert "dmltool embed" in refused(images, "folder of images").fix
    (one / "readme.md").write_text("x")
    assert "readme.md" in refused(one, "is a folder without embedding files").why
    assert "empty" in refused(tmp_path / "empty", "is a folder without embedding files").why


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("HNSW8", "IndexHNSWFlat"),
        ("IVF4,Flat", "IndexIVFFlat"),
        ("SQ8", "IndexScalarQuantizer"),
        ("IDMap,HNSW8", "IndexHNSWFlat"),
        ("IDMap2,IVF4,Flat", "IndexIVFFlat"),
        ("L2norm,Flat", "IndexPreTransform"),
    ],
)
def test_other_faiss_indexes_are_named_and_the_line_converts_them(tmp_path, kind, name):
    index = faiss.index_factory(8, kind)
    index.train(X)
    index.add_with_ids(X, Y) if kind.startswith("IDMap") else index.add(X)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    error = refused(tmp_path / "x.faiss", name)
    assert "reconstruct_n" in error.fix
    if "IVF" not in kind or "IDMap" not in kind:
        follow(error, tmp_path)
        assert load(tmp_path / "x.npy").splits["test"].vectors.shape == X.shape


def test_binary_faiss_indexes_become_bits(tmp_path):
    index, codes = faiss.IndexBinaryFlat(16), (X[:, :2] * 40).astype(np.uint8)
    index.add(codes)
    faiss.write_index_binary(index, str(tmp_path / "x.index"))
    follow(refused(tmp_path / "x.index", "IndexBinaryFlat"), tmp_path)
    found = load(tmp_path / "x.npy").splits["test"].vectors
    np.testing.assert_array_equal(found, np.unpackbits(codes, axis=1))


def test_object_arrays_name_astype_str(tmp_path):
    names = np.array([f"c{y}" for y in Y], object)
    for key in ("labels", "breed"):
        np.savez(tmp_path / "x.npz", **{"embeddings": X, key: names})
        error = refused(tmp_path / "x.npz", "Python objects")
        assert f"{key}.astype(str)" in error.fix
    np.save(tmp_path / "v.npy", X)
    np.save(tmp_path / "y.npy", names)
    error = refused(tmp_path / "v.npy", "Python objects", labels=tmp_path / "y.npy")
    assert ".astype(str)" in error.fix
    np.savez(tmp_path / "x.npz", embeddings=X, labels=Y, extra=names)
    assert load(tmp_path / "x.npz").splits["test"].labels.tolist() == Y.tolist()


def test_a_checkpoint_is_not_taken_for_embeddings(tmp_path):
    weights = {"head.weight": torch.zeros(6, 4)}
    torch.save({"format": FORMAT, "version": 1, "loss": weights}, tmp_path / "best.pt")
    error = refused(tmp_path / "best.pt", "a checkpoint of dmltool")
    assert error.fix == f"Export it: dmltool export {tmp_path}"


def run_fix(error, folder):
    """Runs the command after the colon of a fix in a shell."""
    command = error.fix.partition(": ")[2].replace("python -c", f"{sys.executable} -c")
    subprocess.run(command, shell=True, cwd=folder, check=True, timeout=120)


def test_a_parquet_file_named_csv_is_told_and_the_line_renames_it(tmp_path):
    path = tmp_path / "my table.csv"
    pd.DataFrame(X).assign(label=Y).rename(columns=str).to_parquet(path)
    run_fix(refused(path, "is a .parquet file, not a .csv file"), tmp_path)
    np.testing.assert_array_equal(load(path.with_suffix(".parquet")).splits["test"].vectors, X)


def test_a_compressed_file_named_npy_is_told_and_the_line_renames_it(tmp_path):
    path = tmp_path / "x.npy"
    with gzip.open(path, "wb") as file:
        np.save(file, X)
    run_fix(refused(path, "is a .gz file, not a .npy file"), tmp_path)
    np.testing.assert_array_equal(load(tmp_path / "x.npy.gz").splits["test"].vectors, X)


def test_a_zipped_table_is_told_with_what_is_inside(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.csv.zip", "w") as archive:
        archive.writestr("x.csv", "a,b,label\n1,2,x\n")
    error = refused(tmp_path / "x.csv.zip", "is a zip archive")
    assert "x.csv" in error.why
    assert "unzip" in error.fix
    np.savez(tmp_path / "y.npz", embeddings=X, labels=Y)
    (tmp_path / "y.npz").rename(tmp_path / "y.zip")
    np.testing.assert_array_equal(load(tmp_path / "y.zip").splits["test"].vectors, X)


@pytest.mark.parametrize(("separator", "name"), [("|", "bars"), (" ", "blanks"), ("   ", "blanks")])
def test_a_table_with_another_separator_is_told_and_the_line_converts_it(tmp_path, separator, name):
    rows = [
        separator.join([*(f"{v:.9g}" for v in row), f"c{y}"]) for row, y in zip(X, Y, strict=True)
    ]
    (tmp_path / "x.csv").write_text("\n".join(rows) + "\n")
    run_fix(refused(tmp_path / "x.csv", f"separates its cells by {name}"), tmp_path)
    found = load(tmp_path / "x.new.csv").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(np.float32), X)
    assert found.labels[0] == "c0"


def test_json_records_are_told_and_the_line_converts_them(tmp_path):
    rows = [{"embedding": x.tolist(), "label": int(y)} for x, y in zip(X, Y, strict=True)]
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=2))
    error = refused(tmp_path / "x.json", "a list of JSON objects")
    np.save(tmp_path / "x.npy", X)
    refused(tmp_path / "x.npy", "a list of JSON objects", labels=tmp_path / "x.json")
    run_fix(error, tmp_path)
    found = load(tmp_path / "x.jsonl").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(np.float32), X)


@pytest.mark.parametrize("count", [4, 40])
def test_a_torch_list_of_dicts_is_told_and_the_line_stacks_it(tmp_path, count):
    rows = [{"embedding": torch.from_numpy(x), "label": int(y)} for x, y in zip(X, Y, strict=True)]
    torch.save(rows[:count], tmp_path / "x.pt")
    follow(refused(tmp_path / "x.pt", f"a list of {count} dicts"), tmp_path)
    np.testing.assert_array_equal(load(tmp_path / "x.stacked.pt").splits["test"].vectors, X[:count])


@pytest.mark.parametrize("name", ["", "::key"])
def test_an_empty_name_is_told(name):
    refused(name, "name of a file is empty")


def test_files_that_were_never_downloaded_are_told(tmp_path):
    (tmp_path / "x.npy").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    assert "git lfs pull" in refused(tmp_path / "x.npy", "pointer of Git LFS").fix
    (tmp_path / "x.csv").write_text("\n<!DOCTYPE html><html>404</html>")
    refused(tmp_path / "x.csv", "is a web page")


def test_a_link_that_leads_nowhere_is_told(tmp_path):
    (tmp_path / "x.npy").symlink_to("gone.npy")
    assert "gone.npy" in refused(tmp_path / "x.npy", "leads to no file").why


@pytest.mark.parametrize(("shape", "why"), [((0, 8), "no rows"), ((40, 0), "no numbers")])
def test_an_array_without_numbers_is_told(tmp_path, shape, why):
    np.savez(tmp_path / "x.npz", x=np.zeros(shape), y=np.arange(shape[0]))
    assert why in refused(tmp_path / "x.npz", "has the shape").why
