"""Tables as text: separators, decimal commas, odd numbers, very wide and very long ones."""

import os
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.errors import DmlError
from retrieval.formats import csv as csv_format
from retrieval.loading.load import load
from tests.retrieval.formats.samples import (
    BIG_X,
    BIG_Y,
    NAMES,
    ROUND,
    X64,
    X,
    check,
    frame,
    items,
    only,
    refused,
    run_fix,
)


@ROUND
@given(item=items(), index=st.booleans())
def test_csv_round_trip(tmp_path, item, index):
    x, y = item
    frame("f", y, x).to_csv(tmp_path / "x.csv", index=index)
    found = load(tmp_path / "x.csv").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(x.dtype), x)
    assert [str(label) for label in found.labels] == [str(label) for label in y]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("prefix", ["", "f", "emb_"])
@pytest.mark.parametrize(("suffix", "sep"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_pandas_csv(tmp_path, index, prefix, suffix, sep):
    path = tmp_path / f"x.{suffix}"
    frame(prefix).to_csv(path, index=index, sep=sep)
    check(load(path))


def test_csv_without_header(tmp_path):
    path = tmp_path / "x.csv"
    frame().to_csv(path, index=False, header=False)
    check(load(path))
    table = frame()
    table["label"] = NAMES
    table.to_csv(path, index=False, header=False)
    check(load(path), NAMES)
    path.write_text("0,1,cat\n3,5,dog\n4,4,cat\n7,5,dog\n")  # and no pandas' 0, 1
    assert only(load(path)).labels.tolist() == ["cat", "dog", "cat", "dog"]
    assert only(load(path)).vectors[0].tolist() == [0, 1]
    np.savetxt(path, X, delimiter=",")
    assert only(load(path)).labels is None
    np.testing.assert_array_equal(only(load(path)).vectors.astype(np.float32), X)


def test_csv_of_lists(tmp_path):
    table = pd.DataFrame({"embedding": [str(row.tolist()) for row in X], "class": NAMES})
    table.to_csv(tmp_path / "x.csv")
    check(load(tmp_path / "x.csv"), NAMES)
    table["embedding"] = [str(row) for row in X.astype(np.float64)]
    table.to_csv(tmp_path / "x.csv")
    np.testing.assert_allclose(only(load(tmp_path / "x.csv")).vectors, X, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f0,f1,label\n1,2,a\n1,x,a\n", "line 3, column 2"),
        ("f0,f1,label\n1,2,a\n1,2\n", "line 3: there are 2 cells"),
        ("f0,f1,label\n1,2,a\n1,2,\n", "line 3: the label is empty"),
        ("e,label\n[1 2],a\n[1 2 3],b\n", "line 3: the vector has 3 numbers"),
        ("f0,f1,label\n", "no rows"),
        ("\n\n", "no rows"),
    ],
)
def test_csv_errors_carry_the_line(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DmlError, match=message):
        load(tmp_path / "x.csv")


def test_csv_error_far_down_carries_the_line(tmp_path):
    lines = ["f0,f1,label", *["0.5,0.25,3"] * 5000]
    lines[4321] = "0.5,oops,3"
    (tmp_path / "x.csv").write_text("\n".join(lines))
    with pytest.raises(DmlError, match=r"line 4322, column 2 \(f1\): 'oops'"):
        load(tmp_path / "x.csv")


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize(
    ("suffix", "sep"), [("csv", ";"), ("csv", "\t"), ("tsv", "\t"), ("csv", ",")]
)
def test_decimal_commas(tmp_path, suffix, sep, header):
    path = tmp_path / f"x.{suffix}"
    table = frame("d", NAMES, X64)
    table.to_csv(path, index=False, sep=sep, decimal=",", header=header)  # quoted where sep is ,
    check(load(path), NAMES, X64)


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
    frame("d", NAMES, X64).to_csv(tmp_path / "x.csv", index=False)
    check(load(tmp_path / "x.csv"), NAMES, X64)


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


@pytest.mark.parametrize(("separator", "name"), [("|", "bars"), (" ", "blanks"), ("   ", "blanks")])
def test_a_table_with_another_separator_is_told_and_the_line_converts_it(tmp_path, separator, name):
    rows = [
        separator.join([*(f"{v:.9g}" for v in row), f"c{y}"])
        for row, y in zip(BIG_X, BIG_Y, strict=True)
    ]
    (tmp_path / "x.csv").write_text("\n".join(rows) + "\n")
    run_fix(refused(tmp_path / "x.csv", f"separates its cells by {name}"), tmp_path)
    found = load(tmp_path / "x.new.csv").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(np.float32), BIG_X)
    assert found.labels[0] == "c0"


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_quote_that_is_not_closed_takes_no_rows(tmp_path, end):
    rows = "d0,d1,label\n1,2,a\n3,4,'b\n5,6,c".replace("'", '"') + end
    (tmp_path / "x.csv").write_text(rows)
    refused(tmp_path / "x.csv", "line 3: a double quote is not closed")
    (tmp_path / "x.csv").write_text(rows.replace('"b', '"b"'))
    assert load(tmp_path / "x.csv").splits["test"].labels.tolist() == ["a", "b", "c"]


def test_csv_bombs_of_columns_and_lines_take_no_memory(tmp_path):
    wide = ",".join(["1"] * 20_000)
    (tmp_path / "x.csv").write_text(wide + "\n" + "\n" * 1_000_000)
    found = load(tmp_path / "x.csv").splits["test"].vectors
    assert found.shape == (1, 20_000)
    assert found.base is None or found.base.nbytes < 50 * os.path.getsize(tmp_path / "x.csv")
    (tmp_path / "y.csv").write_text('a,b\n"1,2\n' + "1,2\n" * 1_500_000)
    refused(tmp_path / "y.csv", "line")
