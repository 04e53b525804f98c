"""Tables and labels as text: encodings, decimal commas, odd numbers, very wide and very long."""

import json
import time

import numpy as np
import pandas as pd
import pytest

from retrieval.errors import DmlError
from retrieval.formats import csv as csv_format
from retrieval.loading import load, read
from retrieval.sources import locate

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32).astype(np.float64)
NAMES = np.array(["Straße", "b", "b", "ü", "Straße", "c"])


def frame(labels=NAMES):
    return pd.DataFrame(X, columns=[f"d{n}" for n in range(4)]).assign(label=labels)


def check(found, labels=NAMES, vectors=X):
    np.testing.assert_array_equal(found.splits["test"].vectors, vectors)
    np.testing.assert_array_equal(found.splits["test"].labels, labels)


def refused(path, match, **options):
    with pytest.raises(DmlError, match=match) as error:
        load(path, **options)
    return error.value


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "utf-8"])
def test_tables_and_labels_in_any_unicode_encoding(tmp_path, encoding):
    frame().to_csv(tmp_path / "x.csv", index=False, encoding=encoding)
    check(load(tmp_path / "x.csv"))
    assert load(tmp_path / "x.csv").notes == ()
    np.save(tmp_path / "v.npy", X)
    (tmp_path / "y.txt").write_text("\n".join(NAMES), encoding=encoding)
    check(load(tmp_path / "v.npy", labels=tmp_path / "y.txt"))
    lines = [json.dumps({"e": list(x), "label": n}) for x, n in zip(X, NAMES, strict=True)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding=encoding)
    check(load(tmp_path / "x.jsonl"))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_latin_1_is_read_with_a_note_where_utf_8_is_not_valid(tmp_path, encoding):
    frame().to_csv(tmp_path / "x.csv", index=False, encoding=encoding)
    found = load(tmp_path / "x.csv")
    check(found)
    assert any("Latin-1" in note for note in found.notes)
    np.save(tmp_path / "v.npy", X)
    (tmp_path / "y.txt").write_bytes("\n".join(NAMES).encode(encoding))
    found = load(tmp_path / "v.npy", labels=tmp_path / "y.txt")
    check(found)
    assert any("Latin-1" in note for note in found.notes)


def test_a_binary_file_is_not_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"f0,f1\n\0\0\xff\n")
    refused(tmp_path / "x.csv", "not a text file")


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize(
    ("suffix", "sep"), [("csv", ";"), ("csv", "\t"), ("tsv", "\t"), ("csv", ",")]
)
def test_decimal_commas(tmp_path, suffix, sep, header):
    path = tmp_path / f"x.{suffix}"
    frame().to_csv(path, index=False, sep=sep, decimal=",", header=header)  # quoted where sep is ,
    check(load(path))
    check(load(path), NAMES)


def test_decimal_commas_and_points_in_one_file_are_refused(tmp_path):
    rows = ["d0;d1;label", *["0,5;0,25;a"] * 3000, "0,5;1.234;b"]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    assert "line 3002, column 2" in refused(tmp_path / "x.csv", "1.234").what
    rows = ["d0,d1,label", '0.5,0.5,"1,5"', '0.5,0.5,"2,5"']
    (tmp_path / "x.csv").write_text("\n".join(rows))
    assert load(tmp_path / "x.csv").splits["test"].labels.tolist() == ["1,5", "2,5"]


@pytest.mark.parametrize("label", ["label", "colour"])
def test_very_wide_tables_are_read_in_linear_time(tmp_path, label):
    """A label with a name of its own is looked for among the columns that are no vectors."""
    width = 80_000
    names = ",".join(f"d{n}" for n in range(width))
    row = ",".join(["0.5"] * width)
    (tmp_path / "x.csv").write_text(f"{names},{label}\n{row},a\n{row},b\n")
    start = time.process_time()
    found = load(tmp_path / "x.csv").splits["test"]
    assert time.process_time() - start < 4
    assert found.vectors.shape == (2, width)
    assert found.labels.tolist() == ["a", "b"]
    assert found.taken["vectors"] == "d0 ... d79999, 80,000 columns"


def test_a_cell_of_many_digits_is_refused_at_once(tmp_path):
    (tmp_path / "x.csv").write_text(f"label,d0,d1\na,1,2\nb,{'9' * 100_000}x,3\nc,1,2\n")
    start = time.process_time()
    with pytest.raises(DmlError, match="is not a number"):
        load(tmp_path / "x.csv")
    assert time.process_time() - start < 2


def test_rows_are_held_as_text_by_number_of_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_format, "BLOCK_CELLS", 8)
    frame().to_csv(tmp_path / "x.csv", index=False)
    check(load(tmp_path / "x.csv"))


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**63 - 1, 10**400])
def test_whole_numbers_beyond_float64_are_refused(tmp_path, value):
    (tmp_path / "x.csv").write_text(f"d0,d1,label\n0.5,1,a\n0.5,{value},a\n")
    refused(tmp_path / "x.csv", "line 3: .* beyond 2\\^53")
    (tmp_path / "x.jsonl").write_text(f'{{"e": [0.5, {value}], "label": 1}}\n')
    refused(tmp_path / "x.jsonl", "line 1: .* beyond 2\\^53")
    if abs(value) < 2**63:
        pd.DataFrame({"d0": [0.5], "d1": [value], "label": ["a"]}).to_parquet(
            tmp_path / "x.parquet"
        )
        refused(tmp_path / "x.parquet", "beyond 2\\^53")


def test_whole_numbers_that_float64_holds_are_kept(tmp_path):
    (tmp_path / "x.csv").write_text(f"d0,d1,label\n0.5,{2**53},a\n1e300,{2**60},a\n")
    found = load(tmp_path / "x.csv").splits["test"].vectors
    np.testing.assert_array_equal(found, [[0.5, 2**53], [1e300, 2**60]])


@pytest.mark.parametrize("cell", ["1_0", "\u0661", "0x1p3", "--1"])
def test_only_plain_numbers_are_numbers(tmp_path, cell):
    rows = ["d0,d1,label", *["0.5,0.25,a"] * 3000, f"0.5,{cell},a"]
    (tmp_path / "x.csv").write_text("\n".join(rows), encoding="utf-8")
    refused(tmp_path / "x.csv", "line 3002, column 2 .* is not a number")
    (tmp_path / "x.csv").write_text(f"e,label\n[0.5 1],a\n[0.5 {cell}],b\n", encoding="utf-8")
    refused(tmp_path / "x.csv", "line 3, column 1 .* is not a number")


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


def test_a_column_of_a_series_that_is_mostly_not_numbers_is_an_error(tmp_path):
    table = frame()
    table["d2"] = ["n/a"] * 5 + ["0.5"]
    table.to_csv(tmp_path / "x.csv", index=False)
    error = refused(tmp_path / "x.csv", "d2 is mostly not numbers, for example 'n/a'")
    assert "d0 ... d3, 4 columns" in error.why
    refused(f"{tmp_path / 'x.csv'}::d", "d2 is mostly not numbers")


def test_columns_that_are_not_used_are_named(tmp_path):
    frame().assign(width=3.5, d4="n/a").to_csv(tmp_path / "x.csv", index=False)
    found = load(tmp_path / "x.csv")
    check(found)
    assert [note.partition(": ")[2] for note in found.notes] == ["not used: width, d4 (text)"]
    assert found.splits["test"].taken == {"vectors": "d0 ... d3, 4 columns", "labels": "label"}


def test_errors_fold_series_of_columns(tmp_path):
    table = pd.DataFrame({f"{p}{n}": [0.5] for p in ("a", "b") for n in range(32)})
    table.to_csv(tmp_path / "x.csv", index=False)
    error = refused(tmp_path / "x.csv", "several series")
    assert "a0 ... a31, 32 columns  number" in error.why
    assert len(error.why.splitlines()) == 3


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        (["0", "-0"], ["0", "-0"]),
        (["1", "1.0"], ["1", "1.0"]),
        (["1.0", "1.00"], ["1.0", "1.00"]),
        (["1.0", "2.0"], [1, 2]),
        (["1", "+1"], ["1", "+1"]),
        (["1", "1_0"], ["1", "1_0"]),
        (["-1", "10"], [-1, 10]),
        (["1" * 5000, "2"], ["1" * 5000, "2"]),
    ],
)
def test_labels_that_differ_as_text_stay_different(tmp_path, cells, labels):
    (tmp_path / "x.csv").write_text("d0,d1,label\n" + "".join(f"1,2,{c}\n" for c in cells))
    assert load(tmp_path / "x.csv").splits["test"].labels.tolist() == labels


@pytest.mark.parametrize("pair", ['1, "1"', "1, true", '"a", "a\\u0000"'])
def test_json_labels_of_two_kinds_are_refused(tmp_path, pair):
    np.save(tmp_path / "v.npy", X[:2])
    (tmp_path / "y.json").write_text(f"[{pair}]")
    refused(tmp_path / "v.npy", "labels of the types|zero character", labels=tmp_path / "y.json")


def test_one_long_label_does_not_fill_the_memory(tmp_path):
    rows = ["d0,d1,label", *["1,2,a"] * 20_000, "1,2," + "b" * 100_000]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    found = load(tmp_path / "x.csv").splits["test"].labels
    assert found.nbytes < 1_000_000  # padded, 8 GB
    assert set(found) == {"a", "b" * 100_000}


@pytest.mark.parametrize("at", [0, 4])
def test_whole_numbers_of_a_table_without_header_are_no_label_if_labels_are_given(tmp_path, at):
    rows = [[n / 7 + 0.1, 0.5, n / 3 + 0.1, -0.25] for n in range(12)]
    for n, row in enumerate(rows):
        row.insert(at, n % 3)
    path, labels = tmp_path / "x.csv", tmp_path / "labels.txt"
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    labels.write_text("\n".join("abcd"[n % 4] for n in range(12)))
    assert load(path).splits["test"].vectors.shape == (12, 4)
    found = load(path, labels=labels).splits["test"]
    np.testing.assert_allclose(found.vectors, rows, rtol=1e-6)
    assert found.labels.tolist() == ["abcd"[n % 4] for n in range(12)]


def test_the_split_column_of_a_table_of_labels_is_not_the_label(tmp_path):
    rows = "cat,train\ndog,test\n"
    (tmp_path / "x.csv").write_text(f"animal,split\n{rows}")
    (tmp_path / "y.csv").write_text(f"animal,colour,split\n{rows.replace(',', ',red,')}")
    assert read(locate(tmp_path / "x.csv"), "labels").tolist() == ["cat", "dog"]
    with pytest.raises(DmlError, match="several columns") as caught:
        read(locate(tmp_path / "y.csv"), "labels")
    assert caught.value.fix.endswith("y.csv::animal'")
