"""Tables of images: columns, separators, splits, and paths that are refused."""

from pathlib import Path

import pytest

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import picture, records, splits_of
from trainer.data.datasets import load


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
    assert data.image(1).shape == (6, 8, 3)
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
    assert load("csv", listed, images=str(tmp_path / "there")).image(0).shape == (6, 8, 3)


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
    assert "--set data.options.images=FOLDER" in caught.value.fix
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
    with pytest.raises(DmlError, match="is not a table in UTF-8") as caught:
        load("csv", tmp_path / "x.csv")
    assert "Give the folder of the images" in caught.value.fix  # a photograph instead of its folder


def test_two_tables_in_a_folder_must_be_told_apart(tmp_path):
    table(tmp_path, "path,label\n", "a.csv")
    table(tmp_path, "path,label\n", "b.csv")
    with pytest.raises(DmlError) as caught:
        load("csv", tmp_path)
    assert "a.csv, b.csv" in caught.value.why
