"""What is written in any format comes back: vectors to the bit, labels exactly."""

import json
import struct

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats import FORMATS, arrays, sniff
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading import load

pytestmark = pytest.mark.usefixtures("tried")

ROUND = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=8)


@st.composite
def items(draw, dtypes=("float32", "float64"), text=True, least=2, finite=False):
    """Vectors (N, D) and labels (N,) of any size."""
    n, d = draw(st.integers(1, 6)), draw(st.integers(least, 5))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    elements = {"allow_nan": False, "allow_infinity": not finite} if dtype.kind == "f" else {}
    x = draw(hnp.arrays(dtype, (n, d), elements=hnp.from_dtype(dtype, **elements)))
    kinds = [st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(0, 3)]
    if text:
        kinds.append(TEXT.map(lambda s: "c" + s))
    y = draw(st.one_of(*(st.lists(kind, min_size=n, max_size=n) for kind in kinds)))
    if isinstance(y[0], str):
        return x, np.array(y, np.str_)
    return x, np.array(y, np.uint64 if max(y) >= 2**63 else np.int64)


def same(found, x, y, exact_dtype=True):
    split = found.splits["test"]
    assert list(found.splits) == ["test"]
    if exact_dtype:
        assert split.vectors.dtype == x.dtype
    np.testing.assert_array_equal(split.vectors, x, strict=exact_dtype)
    assert split.labels.dtype.kind == y.dtype.kind
    np.testing.assert_array_equal(split.labels, y)


@ROUND
@given(item=items(arrays.KEPT))
def test_own_files_round_trip(tmp_path, item):
    x, y = item
    names = np.array([f"bild {n} ü.png" for n in range(len(x))])
    path = tmp_path / "x.h5"
    hdf5.write(path, {"test": Split(x, y, names)}, attrs={"model": "m"}, force=True)
    found = load(path)
    split = found.splits["test"]
    labels = split.labels if found.label_names is None else found.label_names[split.labels]
    np.testing.assert_array_equal(split.vectors, x, strict=True)
    np.testing.assert_array_equal(labels, y, strict=False)
    np.testing.assert_array_equal(split.paths, names)
    assert found.attrs["model"] == "m"


@ROUND
@given(item=items(arrays.KEPT), chunks=st.booleans())
def test_plain_hdf5_round_trip(tmp_path, item, chunks):
    x, y = item
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("feats", data=x, chunks=chunks or None)
        file["y"] = y.astype(object) if y.dtype.kind == "U" else y
    same(load(tmp_path / "x.h5"), x, y)


@ROUND
@given(item=items(arrays.KEPT), order=st.sampled_from("CF"))
def test_npy_round_trip(tmp_path, item, order):
    x, y = item
    np.save(tmp_path / "x.npy", np.asarray(x, order=order))
    np.save(tmp_path / "y.npy", y)
    same(load(tmp_path / "x.npy", labels=tmp_path / "y.npy"), x, y)


@ROUND
@given(
    item=items(arrays.KEPT),
    save=st.sampled_from([np.savez, np.savez_compressed]),
    order=st.sampled_from("CF"),
)
def test_npz_round_trip(tmp_path, item, save, order):
    x, y = item
    save(tmp_path / "x.npz", embeddings=np.asarray(x, order=order), labels=y)
    same(load(tmp_path / "x.npz"), x, y)


@ROUND
@given(item=items(["float16", "float32", "float64", "int8", "uint8"], text=False))
def test_safetensors_round_trip(tmp_path, item):
    x, y = item
    safetensors.numpy.save_file({"embeddings": x, "labels": y}, tmp_path / "x.safetensors")
    same(load(tmp_path / "x.safetensors"), x, y)


@ROUND
@given(item=items(arrays.KEPT))
def test_torch_round_trip(tmp_path, item):
    x, y = item
    labels = y.tolist() if y.dtype.kind in "Uu" else torch.from_numpy(y)
    torch.save({"embeddings": torch.from_numpy(x), "labels": labels}, tmp_path / "x.pt")
    same(load(tmp_path / "x.pt"), x, y)


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


@ROUND
@given(item=items(), index=st.booleans())
def test_csv_round_trip(tmp_path, item, index):
    x, y = item
    frame = pd.DataFrame(x, columns=[f"f{n}" for n in range(x.shape[1])])
    frame["label"] = y
    frame.to_csv(tmp_path / "x.csv", index=index)
    found = load(tmp_path / "x.csv").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(x.dtype), x)
    assert [str(label) for label in found.labels] == [str(label) for label in y]


@ROUND
@given(item=items(finite=True))
def test_jsonl_round_trip(tmp_path, item):
    x, y = item
    with (tmp_path / "x.jsonl").open("w") as file:
        for row, label in zip(x, y.tolist(), strict=True):
            numbers = [float(str(value)) for value in row]
            file.write(json.dumps({"embedding": numbers, "label": label}) + "\n")
    found = load(tmp_path / "x.jsonl").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(x.dtype), x)
    np.testing.assert_array_equal(found.labels, y)


@ROUND
@given(item=items(["float32", "uint8"], text=False))
def test_vecs_round_trip(tmp_path, item):
    x, y = item
    path = tmp_path / ("x.fvecs" if x.dtype == np.float32 else "x.bvecs")
    path.write_bytes(b"".join(struct.pack("<i", x.shape[1]) + row.tobytes() for row in x))
    (tmp_path / "y.txt").write_text("".join(f"{label}\n" for label in y))
    found = load(path, labels=tmp_path / "y.txt")
    same(found, x, y)
    assert np.shares_memory(found.splits["test"].vectors, found.splits["test"].vectors.base)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_format_has_a_summary_and_a_module_that_reads(format):
    module = format.load()
    assert format.summary
    assert sum(hasattr(module, name) for name in ("catalogue", "table", "read")) == 1


def test_suffixes_are_unique():
    suffixes = [suffix for format in FORMATS for suffix in format.suffixes]
    assert len(suffixes) == len(set(suffixes))


@pytest.mark.parametrize("name", ["hdf5", "npy", "npz", "arrow", "torch"])
def test_a_file_without_suffix_is_known_by_its_first_bytes(tmp_path, name):
    x, y = np.ones((3, 2), np.float32), np.arange(3)
    path = tmp_path / "data.bin"
    if name == "hdf5":
        hdf5.write(path, {"test": Split(x, y)})
    elif name == "arrow":
        pq.write_table(pa.table({"e": x.tolist(), "label": y}), path)
    elif name == "torch":
        torch.save({"e": torch.from_numpy(x), "y": torch.from_numpy(y)}, path)
    else:
        with path.open("wb") as file:
            np.save(file, x) if name == "npy" else np.savez(file, e=x, y=y)
    assert sniff(path).name == name
    np.testing.assert_array_equal(load(path).splits["test"].vectors, x)


def test_large_arrays_go_to_an_unlinked_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "available_memory", lambda: 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    small, large = arrays.allocate((2, 4), "f4"), arrays.allocate((100, 10), "f4")
    assert not isinstance(small, np.memmap)
    assert isinstance(large, np.memmap)
    assert large.shape == (100, 10)
    assert not list(tmp_path.iterdir())
    large[:] = 3
    assert large.sum() == 3000


def test_compressed_files_larger_than_memory_are_read(tmp_path, monkeypatch):
    x = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", x=x)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, compression="gzip", chunks=(64, 8))
    monkeypatch.setattr(arrays, "available_memory", lambda: 1000)
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 4096)
    for name in ("x.npz", "x.h5"):
        found = load(tmp_path / name).splits["test"].vectors
        assert isinstance(found, np.memmap)
        np.testing.assert_array_equal(found, x)


def test_no_room_for_a_large_array_is_told(monkeypatch):
    monkeypatch.setattr(arrays, "available_memory", lambda: 0)
    with pytest.raises(Exception, match="TMPDIR"):
        arrays.allocate((1 << 40, 1 << 14), "f8")


def test_contiguous_arrays_are_mapped_and_not_copied(tmp_path):
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x, other=np.arange(3))
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=512) as file:
        file["x"] = x
    safetensors.numpy.save_file({"x": x}, tmp_path / "x.safetensors")
    for name in ("x.npy", "x.npz", "x.h5", "x.safetensors"):
        found = load(tmp_path / name).splits["test"].vectors
        assert isinstance(found, np.memmap), name
        np.testing.assert_array_equal(found, x)


def test_spaces_are_part_of_a_text_label_in_every_format(tmp_path):
    names = ["a", " a", "a "] * 2
    np.save(tmp_path / "x.npy", np.eye(6))
    (tmp_path / "y.txt").write_text("\n".join(names) + "\n")
    found = load(tmp_path / "x.npy", labels=tmp_path / "y.txt")
    assert found.splits["test"].labels.tolist() == names
    rows = [f"{n},0.5,{name}" for n, name in enumerate(names)]
    (tmp_path / "x.csv").write_text("\n".join(["v0,v1,label", *rows]) + "\n")
    assert load(tmp_path / "x.csv").splits["test"].labels.tolist() == names


def test_empty_cells_are_nan(tmp_path):
    (tmp_path / "x.csv").write_text("v0,v1,label\n1,2,a\n,2,b\n3,4,a\n")
    vectors = load(tmp_path / "x.csv").splits["test"].vectors
    assert np.isnan(vectors).tolist() == [[False, False], [True, False], [False, False]]
    pq.write_table(
        pa.table({"v0": [1.0, None], "v1": [2.0, 3.0], "label": [1, 2]}), tmp_path / "x.pq"
    )
    assert np.isnan(load(tmp_path / "x.pq").splits["test"].vectors).sum() == 1


def test_labels_of_another_length_are_not_passed_over(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=np.eye(4), labels=np.arange(3))
    with pytest.raises(DmlError, match="cannot be the labels"):
        load(tmp_path / "x.npz")
