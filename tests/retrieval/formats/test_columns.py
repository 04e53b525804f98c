"""Which columns of a table are vectors, label, path and split."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retrieval.errors import DmlError
from retrieval.loading.load import load, read
from retrieval.loading.sources import locate
from tests.retrieval.formats.samples import NAMES, X64, X, Y, check, equal, frame, refused


def test_a_split_column_makes_splits(tmp_path):
    table = frame()
    table["split"] = ["query", "gallery", "query", "train", "gallery", "gallery"]
    table["path"] = NAMES
    table.to_csv(tmp_path / "x.csv", index=False)
    table.to_parquet(tmp_path / "x.parquet")
    with (tmp_path / "x.jsonl").open("w") as file:
        for n, row in table.iterrows():
            record = {"vector": X[n].tolist(), "label": int(row.label), "path": row.path}
            file.write(json.dumps({**record, "split": row.split}) + "\n")
    for suffix in ("csv", "parquet", "jsonl"):
        found = load(tmp_path / f"x.{suffix}").splits
        assert set(found) == {"query", "gallery", "train"}
        equal(found["gallery"].vectors, X[[1, 4, 5]])
        np.testing.assert_array_equal(found["query"].labels, Y[[0, 2]])
        np.testing.assert_array_equal(found["query"].paths, NAMES[[0, 2]])


def test_an_unknown_split_is_an_error(tmp_path):
    (tmp_path / "x.csv").write_text("f0,f1,label,split\n1,2,3,tset\n1,2,3,test\n")
    with pytest.raises(DmlError, match="tset"):
        load(tmp_path / "x.csv")


def test_a_column_of_a_series_that_is_mostly_not_numbers_is_an_error(tmp_path):
    table = frame("d", NAMES, X64)
    table["d2"] = ["n/a"] * 5 + ["0.5"]
    table.to_csv(tmp_path / "x.csv", index=False)
    error = refused(tmp_path / "x.csv", "d2 is mostly not numbers, for example 'n/a'")
    assert "d0 ... d3, 4 columns" in error.why
    refused(f"{tmp_path / 'x.csv'}::d", "d2 is mostly not numbers")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_two_columns_of_one_name_are_not_guessed_between(tmp_path, suffix):
    table = frame("d", NAMES, X64).rename(columns={"d1": "d0"})
    if suffix == ".csv":
        table = table.rename(columns={"d2": "d1", "d3": "d2"})
        table.to_csv(tmp_path / "x.csv", index=False)
    else:
        lists = pa.array(X64.tolist())
        both = pa.table([lists, lists, pa.array(NAMES)], ["d0", "d0", "label"])
        pq.write_table(both, tmp_path / "x.parquet")
    error = refused(tmp_path / f"x{suffix}", "several columns called d0")
    assert "Rename" in error.fix


def test_columns_that_are_not_used_are_named(tmp_path):
    frame("d", NAMES, X64).assign(width=3.5, d4="n/a").to_csv(tmp_path / "x.csv", index=False)
    found = load(tmp_path / "x.csv")
    check(found, NAMES, X64)
    assert [note.partition(": ")[2] for note in found.notes] == ["not used: width, d4 (text)"]
    assert found.splits["test"].taken == {"vectors": "d0 ... d3, 4 columns", "labels": "label"}


def test_errors_fold_series_of_columns(tmp_path):
    table = pd.DataFrame({f"{p}{n}": [0.5] for p in ("a", "b") for n in range(32)})
    table.to_csv(tmp_path / "x.csv", index=False)
    error = refused(tmp_path / "x.csv", "several series")
    assert "a0 ... a31, 32 columns  number" in error.why
    assert len(error.why.splitlines()) == 3


def test_the_split_column_of_a_table_of_labels_is_not_the_label(tmp_path):
    rows = "cat,train\ndog,test\n"
    (tmp_path / "x.csv").write_text(f"animal,split\n{rows}")
    (tmp_path / "y.csv").write_text(f"animal,colour,split\n{rows.replace(',', ',red,')}")
    assert read(locate(tmp_path / "x.csv"), "labels").tolist() == ["cat", "dog"]
    with pytest.raises(DmlError, match="several columns") as caught:
        read(locate(tmp_path / "y.csv"), "labels")
    assert caught.value.fix.endswith("y.csv::animal'")
