"""Labels of any origin: whole numbers and text, never merged and never rounded."""

import struct

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.retrieval.formats.samples import BIG_X, X, check, only, refused


def test_csv_labels_keep_leading_zeros_and_huge_numbers_apart(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a0,a1,label\n1,2,007\n1,2,7\n")
    assert only(load(path)).labels.tolist() == ["007", "7"]
    path.write_text(f"a0,a1,label\n1,2,{2**63}\n1,2,{2**63 + 1}\n")
    assert only(load(path)).labels.tolist() == [2**63, 2**63 + 1]
    path.write_text("a0,a1,label\n1,2,3.0\n1,2,4.0\n")
    assert only(load(path)).labels.tolist() == [3, 4]


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


@pytest.mark.usefixtures("tried")
def test_spaces_are_part_of_a_text_label_in_every_format(tmp_path):
    names = ["a", " a", "a "] * 2
    np.save(tmp_path / "x.npy", np.eye(6))
    (tmp_path / "y.txt").write_text("\n".join(names) + "\n")
    found = load(tmp_path / "x.npy", labels=tmp_path / "y.txt")
    assert found.splits["test"].labels.tolist() == names
    rows = [f"{n},0.5,{name}" for n, name in enumerate(names)]
    (tmp_path / "x.csv").write_text("\n".join(["v0,v1,label", *rows]) + "\n")
    assert load(tmp_path / "x.csv").splits["test"].labels.tolist() == names


@pytest.mark.parametrize("bad", [0.5, np.nan, np.inf, 2.0**53 + 2])
def test_float_labels_must_be_whole_and_exact(tmp_path, bad):
    np.savez(tmp_path / "x.npz", x=X, y=np.array([1.0, 2, 3, 4, 5, 6]))
    check(load(tmp_path / "x.npz"), [1, 2, 3, 4, 5, 6])
    np.savez(tmp_path / "x.npz", x=X, y=np.array([1.0, 2, 3, 4, 5, bad]))
    with pytest.raises(DmlError, match="row 5"):
        load(tmp_path / "x.npz")


def test_float32_labels_beyond_their_precision_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", x=X, y=np.full(6, 2.0**24 + 2, np.float32))
    with pytest.raises(DmlError, match="16777216"):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize("pair", ['1, "1"', "1, true", '"a", "a\\u0000"'])
def test_json_labels_of_two_kinds_are_refused(tmp_path, pair):
    np.save(tmp_path / "v.npy", X[:2])
    (tmp_path / "y.json").write_text(f"[{pair}]")
    refused(tmp_path / "v.npy", "labels of the types|zero character", labels=tmp_path / "y.json")


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("order", "<>")
def test_numbers_that_are_no_characters_are_refused(tmp_path, order):
    labels = np.array([f"{n}é" for n in range(300)], f"{order}U4")
    np.save(tmp_path / "y.npy", labels)
    np.save(tmp_path / "x.npy", BIG_X)
    found = load(tmp_path / "x.npy", labels=tmp_path / "y.npy").splits["test"].labels
    assert found.tolist() == labels.tolist()
    data = bytearray((tmp_path / "y.npy").read_bytes())
    struct.pack_into(f"{order}I", data, len(data) - 16 * 20, 0x110000)
    (tmp_path / "y.npy").write_bytes(data)
    refused(tmp_path / "x.npy", "0x110000 as a character, in row 280", labels=tmp_path / "y.npy")


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("suffix", ["parquet", "feather", "h5", "pt"])
def test_labels_that_differ_in_a_zero_at_the_end_are_not_merged(tmp_path, suffix):
    names, path = ["a", "a\0"] * 150, tmp_path / f"x.{suffix}"
    if suffix == "h5":
        with h5py.File(path, "w") as file:  # in HDF5 itself a text ends at its first zero
            file["x"] = BIG_X
            file["labels"] = np.array(names, "S2")
        assert set(load(path).splits["test"].labels.tolist()) == {"a"}
        return
    if suffix == "pt":
        torch.save({"x": torch.from_numpy(BIG_X), "labels": names}, path)
    else:
        write = pq.write_table if suffix == "parquet" else pa.feather.write_feather
        write(pa.table({"e": BIG_X.tolist(), "label": names}), str(path))
    refused(path, "ends in a zero character, in row 1")


def test_one_long_label_does_not_fill_the_memory(tmp_path):
    rows = ["d0,d1,label", *["1,2,a"] * 20_000, "1,2," + "b" * 100_000]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    found = load(tmp_path / "x.csv").splits["test"].labels
    assert found.nbytes < 1_000_000  # padded, 8 GB
    assert set(found) == {"a", "b" * 100_000}
