"""Parquet and Arrow tables of pandas and pyarrow, and damaged ones."""

import json
import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.errors import DmlError
from retrieval.formats import arrays
from retrieval.loading.load import load
from tests.retrieval.formats.samples import (
    BIG_X,
    BIG_Y,
    LONG,
    NAMES,
    ROUND,
    ROWS,
    X,
    arrow_table,
    check,
    frame,
    items,
    measure,
    only,
    refused,
    same,
)


@pytest.mark.usefixtures("tried")
@ROUND
@given(item=items(arrays.KEPT), write=st.sampled_from(["parquet", "feather", "stream"]))
def test_arrow_list_column_round_trip(tmp_path, item, write):
    x, y = item
    values = pa.array(x.reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(values, x.shape[1])
    table = pa.table({"embedding": column, "label": y.tolist() if y.dtype.kind == "U" else y})
    if write == "parquet":
        pq.write_table(table, path := tmp_path / "x.parquet", row_group_size=2)
    elif write == "feather":
        pa.feather.write_feather(table, path := str(tmp_path / "x.feather"), chunksize=2)
    else:
        path = tmp_path / "x.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    same(load(path), x, y)


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
def test_text_as_polars_writes_it(tmp_path, compression):
    if not hasattr(pa, "string_view"):
        pytest.skip("pyarrow is older than 16")
    names = np.array([f"{name}, longer than what a view holds itself" for name in NAMES])
    labels = pa.array(names).cast(pa.string_view())
    table = pa.table({"embedding": X.tolist(), "label": labels})
    pa.feather.write_feather(table, path := str(tmp_path / "x.arrow"), compression)
    same(load(path), X, names, exact_dtype=False)


@pytest.mark.parametrize("dtype", [pa.binary(), pa.large_binary()], ids=str)
def test_labels_of_bytes_are_text(tmp_path, dtype):
    labels = pa.array([name.encode() for name in NAMES], dtype)
    pq.write_table(pa.table({"embedding": X.tolist(), "label": labels}), tmp_path / "x.parquet")
    same(load(tmp_path / "x.parquet"), X, NAMES, exact_dtype=False)


@pytest.mark.parametrize("dtype", [pa.binary(), pa.large_binary()], ids=str)
@pytest.mark.parametrize("name", ["image", "jpg"])
def test_bytes_of_images_are_neither_paths_nor_labels(tmp_path, dtype, name):
    images = pa.array([b"\xff\xd8" + bytes([n]) for n in range(len(X))], dtype)
    table = pa.table({"embedding": X.tolist(), name: images})
    pq.write_table(table, tmp_path / "x.parquet")
    found = load(tmp_path / "x.parquet")
    assert only(found).labels is None
    assert only(found).paths is None
    assert found.notes == (f"{tmp_path / 'x.parquet'}: not used: {name}",)
    pq.write_table(table.append_column("label", pa.array(NAMES)), tmp_path / "x.parquet")
    same(load(tmp_path / "x.parquet"), X, NAMES, exact_dtype=False)


def of_classes(path, labels, names, embedding=None):
    """A table of Hugging Face's datasets, whose labels are numbers of names."""
    vectors = embedding or {"_type": "List"}
    features = {"embedding": vectors, "label": {"names": names, "_type": "ClassLabel"}}
    noted = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"embedding": X[: len(labels)].tolist(), "label": labels})
    pq.write_table(table.replace_schema_metadata(noted), path)


def test_classes_of_hugging_face_are_matched_by_name(tmp_path):
    of_classes(tmp_path / "q.parquet", [0, 1], ["a", "b"])
    of_classes(tmp_path / "g.parquet", [0, 1], ["b", "c"])
    assert load(tmp_path / "q.parquet").label_names.tolist() == ["a", "b"]
    both = load(tmp_path / "q.parquet", gallery=tmp_path / "g.parquet").splits
    assert both["query"].labels.tolist() == ["a", "b"]
    assert both["gallery"].labels.tolist() == ["b", "c"]
    together = load(tmp_path / "*.parquet").splits["test"]
    assert together.labels.tolist() == ["b", "c", "a", "b"]


def test_classes_are_named_also_if_the_feature_of_the_vectors_is_a_list(tmp_path):
    values = [{"dtype": "float32", "_type": "Value"}]  # as older versions note lists
    of_classes(tmp_path / "x.parquet", [0, 1], ["a", "b"], values)
    assert load(tmp_path / "x.parquet").label_names.tolist() == ["a", "b"]


@pytest.mark.parametrize("names", [None, 5, [1, 2], {"a": 1}])
def test_names_of_classes_that_are_no_texts_are_passed_over(tmp_path, names):
    of_classes(tmp_path / "x.parquet", [0, 1], names)
    found = load(tmp_path / "x.parquet")
    assert found.label_names is None
    assert only(found).labels.tolist() == [0, 1]


@pytest.mark.parametrize("index", [True, False])
def test_pandas_parquet(tmp_path, index):
    table = frame()
    table.index = table.index * 3 + 1
    table["width"] = 3.5
    table.to_parquet(tmp_path / "x.parquet", index=index)
    check(load(tmp_path / "x.parquet"))
    lists = pd.DataFrame({"vec": list(X), "label": pd.Categorical(NAMES), "path": NAMES})
    lists.to_parquet(tmp_path / "y.parquet")
    check(load(tmp_path / "y.parquet"), NAMES)
    np.testing.assert_array_equal(only(load(tmp_path / "y.parquet")).paths, NAMES)


def test_parquet_nulls_and_ragged_rows_are_errors(tmp_path):
    for column, message in (([[1.0, 2.0], None], "row 1.*null"), ([[1.0], [1.0, 2.0]], "row 1")):
        pq.write_table(pa.table({"e": column, "label": [1, 2]}), tmp_path / "x.parquet")
        with pytest.raises(DmlError, match=message):
            load(tmp_path / "x.parquet")
    pq.write_table(pa.table({"e": [[1.0], [2.0]], "label": [1, None]}), tmp_path / "x.parquet")
    with pytest.raises(DmlError, match="empty cells"):
        load(tmp_path / "x.parquet")


@pytest.mark.usefixtures("tried")
def test_a_parquet_that_claims_many_rows_of_nothing_is_refused(tmp_path):
    rows = 1_100_000  # run-length encoding stores a constant column in a few bytes
    table = pa.table({f"f{n}": np.zeros(rows, np.float32) for n in range(64)})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    assert os.path.getsize(tmp_path / "x.parquet") < 1_000_000
    refused(tmp_path / "x.parquet", "not plausible")


@pytest.mark.usefixtures("tried")
def test_arrow_lists_that_begin_outside_their_values_are_refused(tmp_path):
    """Arrow itself looks only where it is asked to, and ends the process when it is used."""
    places = np.arange(301, dtype=np.int32) * 16
    rows = pa.ListArray.from_arrays(pa.array(places), pa.array(BIG_X.ravel()))
    batch = pa.RecordBatch.from_arrays([rows, pa.array(BIG_Y)], ["embedding", "label"])
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), batch.schema) as out:
        out.write_batch(batch)
    data = (tmp_path / "x.arrow").read_bytes()
    assert data.count(places.tobytes()) == 1
    (tmp_path / "x.arrow").write_bytes(data.replace(places.tobytes(), (places + 9000).tobytes()))
    refused(tmp_path / "x.arrow", "out of bounds")


@pytest.mark.usefixtures("tried")
def test_one_long_text_that_every_row_shares(tmp_path):
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), [LONG])
    pq.write_table(arrow_table(["a"] * ROWS), tmp_path / "ok.parquet")
    pq.write_table(arrow_table(shared), tmp_path / "all.parquet")
    pa.feather.write_feather(arrow_table(shared), str(tmp_path / "all.feather"))
    names = [tmp_path / n for n in ("ok.parquet", "all.parquet", "all.feather")]
    assert measure(*names) == ["", ""]
