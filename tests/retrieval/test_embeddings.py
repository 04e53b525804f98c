"""What an embedding file holds, and notes on reading it."""

import json

import numpy as np
import pytest

from retrieval import embeddings
from retrieval.errors import DmlError
from tests.commands import call


def test_metadata_that_json_cannot_hold_is_written_as_text(files):
    import h5py

    with h5py.File(files / "a.h5", "r+") as file:
        file.attrs["loss"] = np.nan
        file.attrs["nothing"] = h5py.Empty("f")
        file.attrs["words"] = np.array([b"a", b"b"])
    attrs = json.loads(call("inspect", files / "a.h5", "--json").stdout)["attrs"]
    assert attrs["loss"] == "nan"
    assert attrs["words"] == ["a", "b"]
    np.save(files / "huge.npy", np.full((4, 2), 1e200))
    assert call("inspect", files / "huge.npy", "--json").exit_code == 0


def test_train_is_left_out_only_where_other_splits_can_be_scored():
    whole, parts = ["train", "test"], ["train", "query", "gallery"]
    assert embeddings.to_read(whole) == whole
    with embeddings.leaving_out_train():
        assert embeddings.to_read(whole) == ["test"]
        assert embeddings.to_read(parts) == ["query", "gallery"]
        assert embeddings.to_read(["train", "query"]) == ["train", "query"]
        with embeddings.leaving_out_train(False):
            assert embeddings.to_read(parts) == parts
    assert embeddings.to_read(whole) == whole


def test_remarks_are_collected_once_each_and_renamed_with_the_errors():
    with embeddings.collected() as notes:
        for _ in range(2):
            embeddings.note("copy.csv is in Latin-1")
        with embeddings.renamed(lambda text: text.replace("copy", "original")):
            embeddings.note("copy.csv has no header")
        with (
            pytest.raises(DmlError, match=r"original\.csv is empty") as caught,
            embeddings.renamed(lambda text: text.replace("copy", "original")),
        ):
            raise DmlError("copy.csv is empty.", "copy.csv has no rows.")
    assert caught.value.why == "original.csv has no rows."
    assert notes == ["copy.csv is in Latin-1", "original.csv has no header"]


def test_query_and_gallery_are_scored_before_test_and_never_train():
    assert embeddings.scored_splits(["train", "test", "gallery", "query"]) == ["query", "gallery"]
    assert embeddings.scored_splits(["gallery", "test"]) == ["test"]
    assert embeddings.scored_splits(["train", "gallery"]) == []


def test_labels_beyond_the_list_of_names_have_no_name():
    names = np.array(["a", "b"])
    assert embeddings.class_names(np.array([1, 2, -1, 0]), names) == ["b", "", "", "a"]
    assert embeddings.class_names(np.array(["x"]), names) is None
    assert embeddings.class_names(np.array([1]), None) is None
