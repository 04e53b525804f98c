"""Embedding files of dmltool and of others, as they are read."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats import arrays
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load
from tests.retrieval.formats.samples import ROUND, X, Y, items, same


@pytest.mark.usefixtures("tried")
@ROUND
@given(item=items(arrays.KEPT), chunks=st.booleans())
def test_plain_hdf5_round_trip(tmp_path, item, chunks):
    x, y = item
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("feats", data=x, chunks=chunks or None)
        file["y"] = y.astype(object) if y.dtype.kind == "U" else y
    same(load(tmp_path / "x.h5"), x, y)


def test_a_split_is_picked_by_key(tmp_path):
    hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y), "train": Split(X + 1, Y)})
    assert set(load(tmp_path / "x.h5").splits) == {"test", "train"}
    assert list(load(f"{tmp_path / 'x.h5'}::train").splits) == ["train"]
    with pytest.raises(DmlError, match="no split called tset"):
        load(f"{tmp_path / 'x.h5'}::tset")


@pytest.mark.parametrize(
    ("version", "match"), [(2, "Update dmltool"), (0, "known"), ("1", "known")]
)
def test_other_versions_are_refused(tmp_path, version, match):
    hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y)})
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.attrs["version"] = version
    with pytest.raises(DmlError, match=match):
        load(tmp_path / "x.h5")


def test_ann_benchmarks_train_is_the_gallery_and_test_the_queries(tmp_path):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["train"], file["test"] = X, X[:2]
        file["neighbors"], file["distances"] = np.zeros((2, 3), int), np.zeros((2, 3))
    np.save(tmp_path / "g.npy", Y)
    (tmp_path / "q.txt").write_text("5\n5\n")
    found = load(tmp_path / "a.hdf5", labels=tmp_path / "q.txt", gallery_labels=tmp_path / "g.npy")
    assert found.format == "ann-benchmarks"
    np.testing.assert_array_equal(found.splits["gallery"].vectors, X)
    np.testing.assert_array_equal(found.splits["query"].vectors, X[:2])
    np.testing.assert_array_equal(found.splits["gallery"].labels, Y)
    np.testing.assert_array_equal(found.splits["query"].labels, [5, 5])
