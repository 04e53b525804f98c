"""The columns of a data set: rows, classes, targets and splits."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from retrieval.embeddings import SPLITS
from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import made, records
from trainer.data.datasets.records import build


def test_rows_classes_and_targets_agree_with_the_records():
    data = build(
        "made",
        Path("r"),
        [("a", "x", "test"), ("b", "y", "train"), ("c", "z", "train"), ("d", "y", "train")],
    )
    assert records(data)[1] == ("b", "y", "train")
    assert data.label_names == ("x", "y", "z")
    assert data.rows("train").tolist() == [1, 2, 3]
    assert data.classes("train").tolist() == [1, 2]
    assert data.targets("train").tolist() == [0, 1, 0]
    assert data.counts() == {"train": (3, 2), "test": (1, 1)}
    assert data.files() == ["r/a", "r/b", "r/c", "r/d"]
    assert data.rows("gallery").tolist() == []


def test_leaving_rows_out_keeps_label_numbers_and_adds_a_note():
    data = made({"a": 2, "b": 2})
    less = data.take(np.array([2, 3]), "two were bad")
    assert less.paths == ("b/0.png", "b/1.png")
    assert less.labels.tolist() == [1, 1]
    assert less.notes == ("two were bad",)
    assert len(data) == 4


def test_an_unknown_split_is_an_error():
    with pytest.raises(DmlError, match="tset"):
        made({"a": 1}, "tset")
    with pytest.raises(DmlError, match="tset"):
        made({"a": 1}).rows("tset")


def test_sixty_thousand_images_are_columns_that_pickle():
    data = made({f"class {c}": 6 for c in range(10_000)})
    again = pickle.loads(pickle.dumps(data))  # noqa: S301 what worker processes do
    assert again.paths == data.paths
    assert data.labels.nbytes + data.splits.nbytes < 1_000_000


def test_splits_are_stored_as_small_codes():
    data = made({"a": 2}, "gallery")
    assert data.splits.dtype == np.int8
    assert SPLITS[data.splits[0]] == "gallery"
