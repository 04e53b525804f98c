"""Text files: their encodings, the ends of their lines, and labels in them."""

import json

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.retrieval.formats.samples import NAMES, X64, X, check, frame, refused


def test_text_labels_from_lines(tmp_path):
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "y.txt").write_text("\n".join(NAMES), encoding="utf-8")
    check(load(tmp_path / "x.npy", labels=tmp_path / "y.txt"), NAMES)
    (tmp_path / "y.csv").write_text("\n".join(NAMES), encoding="utf-8")
    check(load(tmp_path / "x.npy", labels=tmp_path / "y.csv"), NAMES)
    (tmp_path / "y.txt").write_text("a\n\nb\n")
    with pytest.raises(DmlError, match="line 2: the label is empty"):
        load(tmp_path / "x.npy", labels=tmp_path / "y.txt")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "utf-8"])
def test_tables_and_labels_in_any_unicode_encoding(tmp_path, encoding):
    frame("d", NAMES, X64).to_csv(tmp_path / "x.csv", index=False, encoding=encoding)
    check(load(tmp_path / "x.csv"), NAMES, X64)
    assert load(tmp_path / "x.csv").notes == ()
    np.save(tmp_path / "v.npy", X64)
    (tmp_path / "y.txt").write_text("\n".join(NAMES), encoding=encoding)
    check(load(tmp_path / "v.npy", labels=tmp_path / "y.txt"), NAMES, X64)
    lines = [json.dumps({"e": list(x), "label": n}) for x, n in zip(X64, NAMES, strict=True)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding=encoding)
    check(load(tmp_path / "x.jsonl"), NAMES, X64)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_latin_1_is_read_with_a_note_where_utf_8_is_not_valid(tmp_path, encoding):
    frame("d", NAMES, X64).to_csv(tmp_path / "x.csv", index=False, encoding=encoding)
    found = load(tmp_path / "x.csv")
    check(found, NAMES, X64)
    assert any("Latin-1" in note for note in found.notes)
    np.save(tmp_path / "v.npy", X64)
    (tmp_path / "y.txt").write_bytes("\n".join(NAMES).encode(encoding))
    found = load(tmp_path / "v.npy", labels=tmp_path / "y.txt")
    check(found, NAMES, X64)
    assert any("Latin-1" in note for note in found.notes)


def test_a_binary_file_is_not_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"f0,f1\n\0\0\xff\n")
    refused(tmp_path / "x.csv", "not a text file")


@pytest.mark.parametrize("ends", ["\r", "\n", "\r\n", "mixed"])
def test_lines_may_end_in_any_way(tmp_path, ends):
    rows = ["d0,d1,label", *[f"{n},0.5,{n % 7}" for n in range(300)]]
    marks = ["\r", "\n", "\r\n"] * 101 if ends == "mixed" else [ends] * 301
    (tmp_path / "x.csv").write_bytes("".join(map(str.__add__, rows, marks)).encode())
    labels = np.arange(300) % 7
    check(load(tmp_path / "x.csv"), labels, np.stack([np.arange(300), np.full(300, 0.5)], 1))
    np.save(tmp_path / "v.npy", np.ones((300, 2)))
    lines = map(str.__add__, map(str, labels), marks)
    (tmp_path / "y.txt").write_bytes("".join(lines).encode())
    check(load(tmp_path / "v.npy", labels=tmp_path / "y.txt"), labels, np.ones((300, 2)))
