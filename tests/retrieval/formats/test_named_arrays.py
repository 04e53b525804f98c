"""Which of several arrays are vectors and labels."""

import h5py
import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.retrieval.formats.samples import X, Y, check, refused


@pytest.mark.parametrize("names", [("X", "y"), ("feats", "targets"), ("foo", "bar")])
def test_npz_of_one_pair_needs_no_key(tmp_path, names):
    np.savez(tmp_path / "x.npz", **{names[0]: X, names[1]: Y, "scale": np.float32(3)})
    check(load(tmp_path / "x.npz"))


def test_well_known_names_win_over_others(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=X, boxes=X * 2, labels=Y, camera=Y * 0)
    check(load(tmp_path / "x.npz"))


@pytest.mark.parametrize("names", ["{}_{}", "{}/{}", "{}.{}"])
@pytest.mark.parametrize("splits", [("query", "gallery"), ("train", "test")])
def test_names_of_splits_are_recognised(tmp_path, names, splits):
    file = {}
    for n, split in enumerate(splits):
        file[names.format(split, "embeddings")] = X + n
        file[names.format(split, "labels")] = Y + n
    np.savez(tmp_path / "x.npz", distances=np.zeros((6, 6)), **file)
    found = load(tmp_path / "x.npz")
    assert set(found.splits) == set(splits)
    for n, split in enumerate(splits):
        np.testing.assert_array_equal(found.splits[split].vectors, X + n)
        np.testing.assert_array_equal(found.splits[split].labels, Y + n)


def test_two_possible_vectors_are_an_error_that_lists_them(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["image"], file["caption"], file["y"] = X, X[:, :3], Y
    with pytest.raises(DmlError) as error:
        load(tmp_path / "x.h5")
    assert "(6, 4) float32" in str(error.value)
    assert "caption  (6, 3)" in str(error.value)
    assert error.value.fix == f"Choose one: {tmp_path / 'x.h5'}::caption"
    check(load(f"{tmp_path / 'x.h5'}::image"))


def test_two_possible_labels_are_an_error_and_a_key_picks(tmp_path):
    np.savez(tmp_path / "x.npz", emb=X, breed=Y, colour=Y * 0)
    with pytest.raises(DmlError, match="could be the labels"):
        load(tmp_path / "x.npz")
    check(load(f"{tmp_path / 'x.npz'}::emb,breed"))
    check(load(f"{tmp_path / 'x.npz'}::,breed"))
    np.save(tmp_path / "y.npy", Y)
    check(load(tmp_path / "x.npz", labels=tmp_path / "y.npy"))


def test_an_unknown_key_names_the_nearest(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=X, labels=Y)
    with pytest.raises(DmlError, match="Did you mean embeddings"):
        load(f"{tmp_path / 'x.npz'}::embedings")


def test_labels_of_another_length_are_not_passed_over(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=np.eye(4), labels=np.arange(3))
    with pytest.raises(DmlError, match="cannot be the labels"):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize("dtype", ["?", "c8", "S4"])
def test_an_array_whose_dtype_is_not_read_is_not_called_missing(tmp_path, dtype):
    np.save(tmp_path / "x.npy", X.astype(dtype))
    refused(tmp_path / "x.npy", "has no 2-D array of a dtype that is read")


def test_what_is_wrong_with_the_only_array_is_told(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=X.astype(object), labels=Y)
    refused(tmp_path / "x.npz", "x.npz::embeddings holds pickled Python objects")
