"""The counts of official data sets: a missing file, one too many, none at all."""

import os
from unittest.mock import Mock

import pytest

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import write_cub
from trainer.data.datasets import cub, load


def test_a_misspelled_folder_is_told_with_the_right_name(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(DmlError) as caught:
        load("folder", tmp_path / "phots")
    assert caught.value.fix == f"Did you mean {tmp_path / 'photos'}?"
    with pytest.raises(DmlError) as caught:
        load("folder", tmp_path / "phots" / "more")
    assert f"The folder {tmp_path} exists. It holds photos." in caught.value.why


def test_a_misspelled_folder_inside_one_that_may_not_be_listed_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", Mock(side_effect=PermissionError))
    with pytest.raises(DmlError, match="There is no folder") as caught:
        load("folder", tmp_path / "phots")
    assert caught.value.why == f"The folder {tmp_path} exists."


def test_one_missing_file_is_noticed_and_named(tmp_path, monkeypatch):
    root = write_cub(tmp_path)
    monkeypatch.setattr(cub, "EXPECTED", {"train": (6, 3), "test": (4, 2)})
    assert load("cub", tmp_path).notes == ()
    (root / "images" / "002.Bird_2" / "Bird_2_1.jpg").unlink()
    with pytest.raises(DmlError, match="found 5 of 3") as caught:
        load("cub", tmp_path)
    assert "1 of 10 files that images.txt names are missing" in caught.value.why
    assert "images/002.Bird_2/Bird_2_1.jpg" in caught.value.why
    assert len(load("cub", tmp_path, allow_incomplete=True)) == 9


def test_more_images_than_published_are_an_error_too(tmp_path, monkeypatch):
    write_cub(tmp_path)
    monkeypatch.setattr(cub, "EXPECTED", {"train": (6, 3), "test": (3, 2)})
    with pytest.raises(DmlError, match="expected 3 images of 2 classes, found 4 of 2"):
        load("cub", tmp_path)


def test_nothing_at_all_is_an_error_even_when_incomplete_is_allowed(tmp_path):
    root = write_cub(tmp_path)
    for file in (root / "images").rglob("*.jpg"):
        file.unlink()
    with pytest.raises(DmlError, match="not the complete data set"):
        load("cub", tmp_path, allow_incomplete=True)
