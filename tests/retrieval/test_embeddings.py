"""`load`: queries and galleries from several files, labels that mean the same in both."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval.embeddings import Split, load
from retrieval.errors import DmlError
from retrieval.formats import hdf5

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
Y = np.array([0, 0, 1, 1, 2, 2])


@pytest.fixture
def files(tmp_path):
    np.savez(tmp_path / "q.npz", x=X[:2], y=Y[:2])
    np.savez(tmp_path / "g.npz", x=X[2:], y=Y[2:])
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    return tmp_path


def test_a_gallery_makes_the_source_the_queries(files):
    found = load(files / "q.npz", gallery=files / "g.npz")
    assert list(found.splits) == ["query", "gallery"]
    np.testing.assert_array_equal(found.splits["query"].vectors, X[:2])
    np.testing.assert_array_equal(found.splits["gallery"].labels, Y[2:])
    assert found.source == files / "q.npz"


def test_keys_work_for_every_argument(files):
    np.savez(files / "all.npz", a=X[:2], b=X[2:], qy=Y[:2], gy=Y[2:])
    name = f"{files / 'all.npz'}::"
    found = load(name + "a", gallery=name + "b", labels=name + "qy", gallery_labels=name + "gy")
    np.testing.assert_array_equal(found.splits["query"].labels, Y[:2])
    np.testing.assert_array_equal(found.splits["gallery"].vectors, X[2:])
    np.testing.assert_array_equal(found.splits["gallery"].labels, Y[2:])


def test_without_labels_loading_succeeds(files):
    assert load(files / "x.npy").splits["test"].labels is None


def test_a_wrong_number_of_labels_names_both_lengths(files):
    np.save(files / "short.npy", Y[:5])
    with pytest.raises(DmlError, match="5 labels for 6 vectors"):
        load(files / "x.npy", labels=files / "short.npy")


def test_gallery_labels_without_a_gallery_are_an_error(files):
    with pytest.raises(DmlError, match="has none"):
        load(files / "x.npy", gallery_labels=files / "y.npy")


def test_two_galleries_are_an_error(files):
    hdf5.write(files / "x.h5", {"query": Split(X, Y), "gallery": Split(X, Y)})
    with pytest.raises(DmlError, match="gallery of its own"):
        load(files / "x.h5", gallery=files / "g.npz")
    found = load(f"{files / 'x.h5'}::query", gallery=files / "g.npz")
    assert len(found.splits["gallery"].vectors) == 4


def test_labels_that_count_through_different_names_are_compared_by_name(files):
    hdf5.write(files / "q.h5", {"test": Split(X[:3], np.array(["b", "c", "b"]))})
    hdf5.write(files / "g.h5", {"test": Split(X[:2], np.array(["c", "d"]))})
    found = load(files / "q.h5", gallery=files / "g.h5")
    assert found.splits["query"].labels.tolist() == ["b", "c", "b"]
    assert found.splits["gallery"].labels.tolist() == ["c", "d"]
    assert found.label_names is None


def test_huge_labels_of_two_files_stay_exact(files):
    np.savez(files / "a.npz", x=X[:2], y=np.array([2**63, 1], np.uint64))
    found = load(files / "a.npz", gallery=files / "g.npz").splits
    assert found["query"].labels.dtype == found["gallery"].labels.dtype == np.uint64
    np.savez(files / "b.npz", x=X[:2], y=np.array([-1, 1]))
    found = load(files / "a.npz", gallery=files / "b.npz").splits
    assert found["query"].labels.tolist() == [str(2**63), "1"]
    assert found["gallery"].labels.tolist() == ["-1", "1"]


def test_a_name_with_colons_that_exists_is_a_name(files):
    np.save(files / "odd::name.npy", X)
    assert load(files / "odd::name.npy").splits["test"].vectors.shape == (6, 4)


def test_reading_npy_imports_no_optional_library(files):
    code = f"""
import sys
from retrieval.embeddings import load
load({str(files / "x.npy")!r}, labels={str(files / "y.npy")!r})
sys.exit(bool({{"torch", "pyarrow", "pandas", "safetensors", "h5py"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
