"""The table of data sets, the columns, held-out classes, and one's own folders and tables."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retrieval.errors import DmlError
from trainer.data.datasets import DATASETS, DataSet, load, options_of
from trainer.data.datasets.records import SPLITS, build
from trainer.data.datasets.splitting import (
    check_batches,
    divide,
    held_out,
    shuffled,
    with_validation,
    without_small_classes,
)

ROOT = Path(__file__).parents[4]


def picture(path: Path, colour: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (colour, 10, 20)).save(path)


def made(sizes: dict[str, int], split: str = "train") -> DataSet:
    rows = ((f"{name}/{i}.png", name, split) for name, n in sizes.items() for i in range(n))
    return build("made", Path("nowhere"), rows)


def records(data: DataSet) -> list[tuple[str, str, str]]:
    """Path, label and split of each row."""
    labels = [data.label_names[label] for label in data.labels]
    return list(zip(data.paths, labels, [SPLITS[code] for code in data.splits], strict=True))


def splits_of(data: DataSet) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, label, split in records(data):
        found.setdefault(split, set()).add(label)
    return found


# The table


@pytest.mark.parametrize("entry", DATASETS, ids=lambda entry: entry.name)
def test_every_entry_has_a_reader_with_options_and_a_summary(entry):
    assert entry.summary
    assert isinstance(options_of(entry.name), dict)
    assert DATASETS.find(entry.name) is entry


def test_the_table_and_all_readers_load_neither_torch_nor_matplotlib():
    names = [entry.name for entry in DATASETS]
    code = f"""
import sys
from trainer.data.datasets import options_of
import trainer.data.images
for name in {names}: options_of(name)
sys.exit(any(m in sys.modules for m in ("torch", "matplotlib", "scipy")))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_unknown_data_set_names_the_nearest():
    with pytest.raises(DmlError) as caught:
        load("folders", "somewhere")
    assert "Did you mean 'folder'?" in caught.value.fix
    assert "cub" in caught.value.why


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(DmlError) as caught:
        load("folder", "somewhere", test_fracton=0.5)
    assert "test_fracton" in caught.value.what
    assert "Did you mean 'test_fraction'?" in caught.value.fix


@pytest.mark.parametrize("entry", [e for e in DATASETS if e.needs_root], ids=lambda e: e.name)
def test_a_missing_root_is_said_plainly(entry, tmp_path):
    with pytest.raises(DmlError, match="needs to know where its files are"):
        load(entry.name)
    with pytest.raises(DmlError, match=r"There is no (folder|table) .*nothing-here"):
        load(entry.name, tmp_path / "nothing-here")


@pytest.mark.parametrize("entry", [e for e in DATASETS if e.needs_root], ids=lambda e: e.name)
def test_an_empty_folder_is_an_error_that_says_what_is_wanted(entry, tmp_path):
    with pytest.raises(DmlError) as caught:
        load(entry.name, tmp_path)
    assert str(tmp_path) in caught.value.what
    assert caught.value.fix


def test_a_data_set_without_files_refuses_a_root(tmp_path):
    with pytest.raises(DmlError, match="reads no files"):
        load("glyphs", tmp_path)


# Columns


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


# Held-out classes


def test_validation_takes_whole_classes_from_train_only():
    data = build(
        "made",
        None,
        [(f"{c}-{i}", f"c{c}", "train" if c < 40 else "test") for c in range(60) for i in range(3)],
        reader=print,
    )
    cut = with_validation(data, 0.1, seed=3)
    found = splits_of(cut)
    assert len(found["val"]) == 4
    assert not found["val"] & found["train"]
    assert found["train"] | found["val"] == splits_of(data)["train"]
    assert found["test"] == splits_of(data)["test"]
    assert cut.counts()["val"] == (12, 4)
    assert len(data.rows("val")) == 0


def test_validation_depends_on_the_seed_and_on_nothing_else():
    data = made({f"c{c}": 3 for c in range(50)})
    mirrored = made({f"c{c}": 3 for c in reversed(range(50))})
    first = splits_of(with_validation(data, 0.2, 1))["val"]
    assert first == splits_of(with_validation(mirrored, 0.2, 1))["val"]
    assert first != splits_of(with_validation(data, 0.2, 2))["val"]


def test_the_order_of_classes_never_changes_between_versions():
    assert shuffled("abcdef", 0) == ["f", "d", "c", "e", "a", "b"]


def test_validation_passes_over_classes_of_one_image():
    data = made({"lone": 1, "solo": 1, "a": 2, "b": 2, "c": 2, "d": 2})
    for seed in range(10):
        assert not {"lone", "solo"} & splits_of(with_validation(data, 0.3, seed))["val"]


def test_a_given_validation_split_stays():
    data = build("made", None, [("a", "x", "train"), ("b", "y", "val")], reader=print)
    assert with_validation(data) is data


def test_no_validation_is_cut_at_fraction_zero():
    data = made({"a": 2, "b": 2})
    assert with_validation(data, 0) is data


@pytest.mark.parametrize("sizes", [{"a": 5, "b": 5, "c": 5}, {"a": 5, "b": 1, "c": 1, "d": 1}])
def test_too_few_classes_for_validation_is_an_error(sizes):
    with pytest.raises(DmlError) as caught:
        with_validation(made(sizes), 0.1)
    assert "too few classes" in caught.value.what
    assert "--select last" in caught.value.fix


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, True, "0.1", float("nan")])
def test_a_fraction_outside_zero_to_one_is_an_error(fraction):
    with pytest.raises(DmlError, match="val_fraction"):
        with_validation(made({"a": 2, "b": 2, "c": 2, "d": 2}), fraction)


@given(st.integers(4, 60), st.floats(0, 0.4), st.floats(0, 0.4), st.integers(0, 2**31))
def test_dividing_gives_each_class_one_split_of_the_size_asked_for(n, test, val, seed):
    names = [f"c{i}" for i in range(n)]
    want = held_out(n, test, "test"), held_out(n, val, "val")
    if n - sum(want) < 2:
        with pytest.raises(DmlError, match="cannot be divided"):
            divide(Path("x"), names, test, val, seed)
        return
    splits = list(divide(Path("x"), names, test, val, seed).values())
    assert (splits.count("test"), splits.count("val")) == want
    assert len(splits) == n


def test_batches_that_can_be_filled_pass():
    check_batches(made({"a": 3, "b": 4, "c": 3}), 3, 3)
    check_batches(made({"a": 1, "b": 4}), 2, 3, repeat=True)


def test_a_class_with_too_few_images_for_the_batch_is_named():
    with pytest.raises(DmlError) as caught:
        check_batches(made({"rare": 2, "common": 9}), 2, 4)
    assert "1 of 2" in caught.value.what
    assert "rare (2)" in caught.value.why
    assert "common" not in caught.value.why
    assert "at most 2" in caught.value.fix


def test_too_few_classes_for_the_batch_is_an_error_even_with_repeats():
    with pytest.raises(DmlError, match="needs 3 classes, train has 2"):
        check_batches(made({"a": 9, "b": 9}), 3, 2, repeat=True)


def test_small_classes_can_be_left_out_of_training():
    data = build(
        "made",
        None,
        [
            ("1", "small", "train"),
            *((f"{i}", "big", "train") for i in range(4)),
            ("9", "small", "test"),
        ],
        reader=print,
    )
    less = without_small_classes(data, 2)
    assert less.counts() == {"train": (4, 1), "test": (1, 1)}
    assert "1 class with fewer than 2 images" in less.notes[0]
    with pytest.raises(DmlError, match="no classes are left"):
        without_small_classes(data, 5)


# Folders


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
    assert data.image(row).shape == (4, 6, 3)
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
    with pytest.raises(DmlError, match="none of 2 folders holds images"):
        load("folder", tmp_path)


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


# Tables


def table(root: Path, text: str, name: str = "list.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def test_a_table_with_splits_is_read_as_it_says(tmp_path):
    for name in ("1.png", "deep/2.png", "3, with comma.png"):
        picture(tmp_path / name)
    listed = table(
        tmp_path,
        "split,path,label\ntrain,1.png,Zoë\nQUERY,./deep/2.png,b\n\n"
        'gallery,"3, with comma.png",b\n',
    )
    data = load("csv", listed)
    assert records(data) == [
        ("1.png", "Zoë", "train"),
        ("deep/2.png", "b", "query"),
        ("3, with comma.png", "b", "gallery"),
    ]
    assert data.image(1).shape == (4, 6, 3)
    assert load("csv", tmp_path).paths == data.paths


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_separators_and_byte_order_marks_of_spreadsheets_are_understood(tmp_path, mark):
    picture(tmp_path / "1.png")
    listed = table(tmp_path, f"\ufefffilename{mark}class{mark}split\r\n1.png{mark}a{mark}train\r\n")
    assert records(load("csv", listed)) == [("1.png", "a", "train")]


def test_a_table_without_splits_is_divided_by_class(tmp_path):
    lines = []
    for c in range(8):
        for i in range(2):
            picture(tmp_path / f"{c}-{i}.png")
            lines.append(f"{c}-{i}.png,{c}")
    found = splits_of(load("csv", table(tmp_path, "path,label\n" + "\n".join(lines)), seed=4))
    assert {k: len(v) for k, v in found.items()} == {"train": 6, "test": 2}


def test_images_of_a_table_may_lie_elsewhere(tmp_path):
    picture(tmp_path / "there" / "1.png")
    listed = table(tmp_path, "path,label,split\n1.png,a,train\n")
    assert load("csv", listed, images=str(tmp_path / "there")).image(0).shape == (4, 6, 3)


def test_a_full_path_under_the_folder_of_the_table_is_accepted(tmp_path):
    picture(tmp_path / "in" / "1.png")
    listed = table(tmp_path, f"path,label,split\n{tmp_path}/in/1.png,a,train\n")
    assert load("csv", listed).paths == ("in/1.png",)


@pytest.mark.parametrize(
    "path",
    ["../1.png", "a/../../1.png", "/etc/passwd", "\\\\host\\x", "C:\\x.png", "..", "a\\..\\b"],
)
def test_a_path_that_leads_outside_is_refused(tmp_path, path):
    inner = tmp_path / "data"
    picture(tmp_path / "1.png")
    picture(inner / "a" / "2.png")
    listed = table(inner, f"path,label,split\na/2.png,a,train\n{path},a,train\n")
    with pytest.raises(DmlError) as caught:
        load("csv", listed, allow_incomplete=True)
    assert f"{path!r} leads outside" in caught.value.what
    assert "entry 3" in caught.value.what


def test_missing_files_of_a_table_are_named_and_may_be_left_out(tmp_path):
    picture(tmp_path / "1.png")
    listed = table(tmp_path, "path,label,split\n1.png,a,train\n2.png,a,train\n")
    with pytest.raises(DmlError) as caught:
        load("csv", listed)
    assert "1 of 2" in caught.value.why
    assert "2.png" in caught.value.why
    assert "--allow-incomplete" in caught.value.fix
    data = load("csv", listed, allow_incomplete=True)
    assert data.paths == ("1.png",)
    assert "2.png" in data.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column called path"),
        ("image_name,label\n", "no column called path"),
        ("path,lable\n", "Did you mean lable"),
        ("path,label\n", "lists no images"),
        ("path,label\n1.png\n", "line 2 has 1 cells, not 2"),
        ("path,label\n1.png,\n", "line 2 has no label"),
        ("path,label,split\n1.png,a,trian\n", "did you mean train"),
        ("path,label\n,a\n", "leads outside"),
    ],
)
def test_a_table_that_cannot_be_understood_says_where(tmp_path, text, said):
    with pytest.raises(DmlError, match=said):
        load("csv", table(tmp_path, text))


def test_a_table_that_is_not_text_is_an_error(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"path,label\n\xff\xfe\x00,1\n")
    with pytest.raises(DmlError, match="cannot be read"):
        load("csv", tmp_path / "x.csv")


def test_two_tables_in_a_folder_must_be_told_apart(tmp_path):
    table(tmp_path, "path,label\n", "a.csv")
    table(tmp_path, "path,label\n", "b.csv")
    with pytest.raises(DmlError) as caught:
        load("csv", tmp_path)
    assert "a.csv, b.csv" in caught.value.why


def test_splits_are_stored_as_small_codes():
    data = made({"a": 2}, "gallery")
    assert data.splits.dtype == np.int8
    assert SPLITS[data.splits[0]] == "gallery"
