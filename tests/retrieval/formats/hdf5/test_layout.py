"""What stands in an embedding file beside its rows, and what may differ when it is resumed."""

import os

import h5py
import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load
from tests.retrieval.formats.hdf5.rows import ATTRS, PATHS, X, Y, stop_early, writer


def test_the_layout_is_the_documented_one(tmp_path):
    with writer(tmp_path / "x.h5", label_names=["a", "b", "c", "d", "e"]) as out:
        out.write("test", 0, X)
    with h5py.File(tmp_path / "x.h5") as file:
        assert set(file) == {"test", "label_names"}
        assert set(file["test"]) == {"embeddings", "labels", "paths"}
        assert (file.attrs["format"], file.attrs["version"]) == ("dmltool-embeddings", 1)
        assert file["test/embeddings"].chunks is None
        assert file["test/embeddings"].id.get_offset() is not None
        assert file["test/labels"].dtype == np.int64
        assert h5py.check_string_dtype(file["test/paths"].dtype).encoding == "utf-8"
        assert len(file.attrs["paths_sha256"]) == 64
    assert load(tmp_path / "x.h5").label_names.tolist() == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attrs": ATTRS | {"model_sha256": "other"}}, "model_sha256"),
        ({"attrs": ATTRS | {"preprocessing": {"size": 32}}}, "preprocessing"),
        ({"dtype": "float16"}, "dtype of test"),
        ({"dim": 5}, "shape of test"),
        ({"splits": {"test": (Y + 1, PATHS)}}, "labels of test"),
        ({"splits": {"test": (Y, PATHS[::-1])}}, "paths_sha256"),
        ({"splits": {"query": (Y, PATHS)}}, "splits"),
        ({"label_names": ["a"] * 5}, "label names"),
    ],
)
def test_resuming_something_else_is_refused(tmp_path, changes, named):
    stop_early(tmp_path / "x.h5")
    with pytest.raises(DmlError, match=named), writer(tmp_path / "x.h5", resume=True, **changes):
        pass
    assert (tmp_path / "x.h5.partial").exists()


def test_float16_overflow_is_an_error_and_not_infinity(tmp_path):
    out = writer(tmp_path / "x.h5", dtype="float16")
    with pytest.raises(DmlError, match="does not fit float16"), out:
        out.write("test", 0, X * 1e6)


def test_string_labels_become_indices_into_names(tmp_path):
    names = np.array(["cat", "ant", "bee", "ant"])
    splits = {"query": Split(X[:4], names), "gallery": Split(X[:2], names[2:])}
    hdf5.write(tmp_path / "x.h5", splits)
    found = load(tmp_path / "x.h5")
    assert found.label_names.tolist() == ["ant", "bee", "cat"]
    assert found.splits["query"].labels.tolist() == [2, 0, 1, 0]
    assert found.splits["gallery"].labels.tolist() == [1, 0]


def test_names_that_are_not_utf8_and_very_long_ones_come_back(tmp_path):
    paths = np.array([os.fsdecode(b"caf\xe9.png"), "ü" * 300, ""])
    hdf5.write(tmp_path / "x.h5", {"test": Split(X[:3], Y[:3], paths)})
    assert load(tmp_path / "x.h5").splits["test"].paths.tolist() == paths.tolist()


def test_class_names_that_are_not_utf8_come_back(tmp_path):
    names = np.array([os.fsdecode(b"caf\xe9"), "ça", "plain"])
    hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y % 3)}, label_names=names)
    assert load(tmp_path / "x.h5").label_names.tolist() == names.tolist()
    hdf5.write(tmp_path / "y.h5", {"test": Split(X, names[Y % 3])})
    found = load(tmp_path / "y.h5")
    named = found.label_names[found.splits["test"].labels]
    assert named.tolist() == names[Y % 3].tolist()


def test_half_a_surrogate_pair_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(DmlError, match="cannot be written"):
        hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y, np.array(["\ud800"] * 10))})
    assert not list(tmp_path.iterdir())


def test_one_very_long_label_is_written_and_evaluated(tmp_path):
    from retrieval import evaluate

    count = 2000
    vectors = np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)
    names = np.array([f"class {n // 4}" for n in range(count - 4)] + ["b" * 300_000] * 4, object)
    paths = np.array([f"{n}.png" for n in range(count - 1)] + ["p" * 100_000], object)
    hdf5.write(tmp_path / "x.h5", {"test": Split(vectors, names, paths)})
    found = load(tmp_path / "x.h5")
    assert found.splits["test"].paths.tolist() == paths.tolist()
    assert found.label_names.nbytes < 1_000_000
    codes = np.unique(names, return_inverse=True)[1]  # intervals follow the order of names
    same = evaluate(vectors, codes, seeds=1)["distances"]
    assert evaluate(vectors, names, seeds=1)["distances"] == same
    part = found.splits["test"]
    assert evaluate(part.vectors, part.labels, seeds=1)["distances"] == same
