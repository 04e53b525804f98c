"""Folders of one's own: their classes, their splits, and what is left out of them."""

import os

import numpy as np
import pytest

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import picture, splits_of
from trainer.data.datasets import load


@pytest.fixture
def folders(tmp_path):
    for c in range(8):
        for i in range(3):
            picture(tmp_path / f"class {c}" / f"{i}.png", c)
    return tmp_path


def test_a_folder_of_folders_is_divided_by_class(folders):
    data = load("folder", folders)
    found = splits_of(data)
    assert {k: len(v) for k, v in found.items()} == {"train": 6, "test": 2}
    assert not found["train"] & found["test"]
    assert len(data) == 24
    assert data.options == {"test_fraction": 0.25, "val_fraction": 0.0, "seed": 0}
    row = data.paths.index("class 5/2.png")
    assert data.image(row).shape == (6, 8, 3)
    assert data.image(row)[0, 0].tolist() == [5, 10, 20]


def test_fractions_and_seed_of_a_folder_are_honoured(folders):
    found = splits_of(load("folder", folders, test_fraction=0.5, val_fraction=0.25, seed=1))
    assert {k: len(v) for k, v in found.items()} == {"train": 2, "val": 2, "test": 4}
    others = [splits_of(load("folder", folders, seed=s))["test"] for s in range(6)]
    assert any(other != others[0] for other in others)


def test_images_below_a_class_folder_count_and_other_files_do_not(folders):
    picture(folders / "class 1" / "more" / "deep" / "x.JPG")
    (folders / "class 1" / "notes.txt").write_text("not an image")
    picture(folders / "class 1" / ".hidden.png")
    picture(folders / ".cache" / "x.png")
    (folders / "readme.md").write_text("x")
    data = load("folder", folders)
    assert len(data) == 25
    assert "class 1/more/deep/x.JPG" in data.paths
    assert len(data.label_names) == 8


def test_files_that_are_left_out_are_counted_by_their_suffix(folders):
    (folders / "class 1" / "IMG_1.HEIC").write_bytes(b"x")
    (folders / "class 2" / "IMG_2.heic").write_bytes(b"x")
    (folders / "class 2" / "README").write_text("x")
    (folders / "class 2" / ".DS_Store").write_text("x")
    picture(folders / "stray.png")
    first, second = load("folder", folders).notes
    assert first == (
        f"{folders}: files left out because of their suffix: 2 .heic, 1 without a suffix."
    )
    assert second == f"{folders}: 1 image beside the class folders left out: stray.png."


def test_an_empty_class_folder_is_left_out_with_a_note(folders):
    before = load("folder", folders)
    (folders / "void").mkdir()
    (folders / "void" / "x.txt").write_text("x")
    data = load("folder", folders)
    assert data.paths == before.paths
    assert data.label_names == before.label_names
    assert np.array_equal(data.splits, before.splits)
    assert [note for note in data.notes if "1 folder without images left out: void." in note]


def test_folders_that_are_all_empty_are_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(DmlError, match="none of 2 folders holds images") as caught:
        load("folder", tmp_path)
    assert "Empty: a, b." in caught.value.why


@pytest.mark.parametrize("top", ["", "train"])
def test_folders_of_photographs_in_heic_only_are_not_called_empty(tmp_path, top):
    for name in ("a", "b"):
        (tmp_path / top / name).mkdir(parents=True)
        (tmp_path / top / name / "1.heic").write_bytes(b"x")
    with pytest.raises(DmlError, match="none of 2 folders holds images") as caught:
        load("folder", tmp_path)
    assert "They hold 2 .heic." in caught.value.why
    assert "Convert the files" in caught.value.fix


def test_folders_named_as_splits_are_the_splits(tmp_path):
    for top, name in [("Train", "a"), ("Train", "b"), ("valid", "c"), ("test", "d")]:
        picture(tmp_path / top / name / "1.png")
    data = load("folder", tmp_path)
    assert splits_of(data) == {"train": {"a", "b"}, "val": {"c"}, "test": {"d"}}
    assert data.notes == ()
    picture(tmp_path / "loose.png")
    assert (
        "1 image beside the class folders left out: loose.png." in load("folder", tmp_path).notes[0]
    )


def test_class_folders_of_a_split_may_be_links(tmp_path):
    for name in ("elsewhere/a/1.png", "elsewhere/b/1.png", "root/test/c/1.png"):
        picture(tmp_path / name)
    root = tmp_path / "root"
    (root / "train").mkdir()
    for name in "ab":
        (root / "train" / name).symlink_to(tmp_path / "elsewhere" / name)
    (root / "test" / "c" / "below").symlink_to(tmp_path / "elsewhere")  # not followed
    (root / "test" / "labels.txt").write_text("beside the class folders")
    for notes in ([], [f"{root}: 1 folder without images left out: docs."]):
        data = load("folder", root)
        assert data.paths == ("test/c/1.png", "train/a/1.png", "train/b/1.png")
        assert splits_of(data) == {"train": {"a", "b"}, "test": {"c"}}
        assert list(data.notes) == notes
        (root / "docs").mkdir(exist_ok=True)


def test_splits_beside_another_folder_are_listed_once(tmp_path, monkeypatch):
    walked = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top, **how: walked.append(str(top)) or walk(top, **how))
    for name in ("train/a/1.png", "test/b/1.png"):
        picture(tmp_path / name)
    (tmp_path / "docs").mkdir()
    assert len(load("folder", tmp_path)) == 2
    assert walked == [str(tmp_path / name) for name in ("docs", "test", "train")]


def test_folders_beside_the_splits_do_not_make_them_classes_without_a_word(tmp_path):
    for top, name in [("train", "a"), ("train", "b"), ("test", "d")]:
        picture(tmp_path / top / name / "1.png")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "readme.txt").write_text("x")
    (tmp_path / "test" / "d" / "2.heic").write_text("x")
    picture(tmp_path / "loose.png")
    data = load("folder", tmp_path)
    assert splits_of(data) == {"train": {"a", "b"}, "test": {"d"}}
    assert data.notes == (
        f"{tmp_path}: 1 folder without images left out: docs.",
        f"{tmp_path}: 1 image beside the class folders left out: loose.png.",
        f"{tmp_path}: files left out because of their suffix: 1 .txt, 1 .heic.",
    )
    picture(tmp_path / "more" / "1.png")
    data = load("folder", tmp_path, test_fraction=0.0)
    assert set(data.label_names) == {"train", "test", "more"}
    assert data.notes[-1].endswith(
        "test, train taken as classes, not as splits, because the folder more also holds images. "
        "Move it away to use test and train as splits."
    )


def test_a_class_in_train_and_test_is_noted(tmp_path):
    for top in ("train", "test"):
        picture(tmp_path / top / "a" / "1.png")
    assert "Train and held-out images share 1 class (a)" in load("folder", tmp_path).notes[0]


def test_too_few_classes_to_divide_is_an_error_with_a_way_out(tmp_path):
    for name in "abc":
        picture(tmp_path / name / "1.png")
    with pytest.raises(DmlError) as caught:
        load("folder", tmp_path)
    assert "3 classes cannot be divided" in caught.value.what
    assert "test_fraction=0" in caught.value.fix
    assert splits_of(load("folder", tmp_path, test_fraction=0)) == {"train": {"a", "b", "c"}}


def test_images_directly_in_the_root_are_not_a_class(tmp_path):
    picture(tmp_path / "1.png")
    with pytest.raises(DmlError, match="holds no folders"):
        load("folder", tmp_path)


def test_a_file_as_root_is_not_a_folder(tmp_path):
    picture(tmp_path / "1.png")
    with pytest.raises(DmlError, match="is not a folder"):
        load("folder", tmp_path / "1.png")
