"""The table of formats, and what holds for the files of all or several of them."""

import gzip
import json
import os
import sys
import warnings

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from click.testing import CliRunner

from cli import main
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats import FORMATS, main_suffixes, sniff
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load
from tests.retrieval.formats.samples import (
    BIG_X,
    BIG_Y,
    LONG,
    NAMES,
    ROWS,
    ZEROS,
    X,
    Y,
    arrow_table,
    check,
    measure,
    only,
    refused,
    run_fix,
)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_format_has_a_summary_and_a_module_that_reads(format):
    module = format.load()
    assert format.summary
    assert sum(hasattr(module, name) for name in ("catalogue", "table", "read")) == 1


def test_suffixes_are_unique():
    suffixes = [suffix for format in FORMATS for suffix in format.suffixes]
    assert len(suffixes) == len(set(suffixes))


@pytest.mark.usefixtures("tried")
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


def test_a_parquet_file_named_csv_is_told_and_the_line_renames_it(tmp_path):
    path = tmp_path / "my table.csv"
    pd.DataFrame(BIG_X).assign(label=BIG_Y).rename(columns=str).to_parquet(path)
    run_fix(refused(path, "is a .parquet file, not a .csv file"), tmp_path)
    np.testing.assert_array_equal(load(path.with_suffix(".parquet")).splits["test"].vectors, BIG_X)


def test_a_compressed_file_named_npy_is_told_and_the_line_renames_it(tmp_path):
    path = tmp_path / "x.npy"
    with gzip.open(path, "wb") as file:
        np.save(file, X)
    run_fix(refused(path, "is a .gz file, not a .npy file"), tmp_path)
    np.testing.assert_array_equal(load(tmp_path / "x.npy.gz").splits["test"].vectors, X)


def test_a_file_named_as_if_it_were_compressed_is_told_and_the_line_renames_it(tmp_path):
    path = tmp_path / "x.npy.gz"
    with path.open("wb") as file:
        np.save(file, X)
    run_fix(refused(path, "is a .npy file, not a .gz file"), tmp_path)
    np.testing.assert_array_equal(load(tmp_path / "x.npy").splits["test"].vectors, X)


@pytest.mark.parametrize(("library", "file"), [("pyarrow", "x.parquet"), ("torch", "x.pt")])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, library, file):
    (tmp_path / file).write_bytes(b"whatever")
    monkeypatch.delitem(sys.modules, "retrieval.formats.arrow", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DmlError, match="pip install"):
        load(tmp_path / file)


@pytest.mark.parametrize(("name", "mark"), [("zarr", "zarr.json"), ("lance", "_versions")])
def test_without_its_package_the_line_that_installs_it_is_named(tmp_path, monkeypatch, name, mark):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    (tmp_path / f"x.{name}" / mark).mkdir(parents=True)
    with pytest.raises(DmlError, match=f"needs {name}, which is not installed") as error:
        load(tmp_path / f"x.{name}")
    assert 'pip install -c constraints.txt ".[stores]"' in error.value.fix


@pytest.mark.usefixtures("tried")
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


@pytest.mark.usefixtures("tried")
def test_empty_cells_are_nan(tmp_path):
    (tmp_path / "x.csv").write_text("v0,v1,label\n1,2,a\n,2,b\n3,4,a\n")
    vectors = load(tmp_path / "x.csv").splits["test"].vectors
    assert np.isnan(vectors).tolist() == [[False, False], [True, False], [False, False]]
    pq.write_table(
        pa.table({"v0": [1.0, None], "v1": [2.0, 3.0], "label": [1, 2]}), tmp_path / "x.pq"
    )
    assert np.isnan(load(tmp_path / "x.pq").splits["test"].vectors).sum() == 1


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8"])
def test_torch_and_safetensors_dtypes(tmp_path, dtype):
    x = (torch.from_numpy(X) * 20).to(getattr(torch, dtype))
    both = {"embeddings": x, "labels": torch.from_numpy(Y)}
    torch.save(both, tmp_path / "x.pt")
    safetensors.torch.save_file(both, tmp_path / "x.safetensors")
    wanted = x.float().numpy() if dtype == "bfloat16" else x.numpy()
    for name in ("x.pt", "x.safetensors"):
        found = only(load(tmp_path / name))
        np.testing.assert_array_equal(found.vectors, wanted, strict=True)
        np.testing.assert_array_equal(found.labels, Y)


def label_files(tmp_path):
    np.save(tmp_path / "y.npy", Y.reshape(-1, 1))
    np.savez(tmp_path / "y.npz", Y)
    (tmp_path / "y.txt").write_text("\n".join(map(str, Y)) + "\n\n")
    (tmp_path / "y.json").write_text(json.dumps(Y.tolist()))
    pd.DataFrame({"label": Y, "image": NAMES}).to_csv(tmp_path / "y.csv")
    pd.DataFrame({"anything": Y}).to_csv(tmp_path / "y.tsv", index=False, sep="\t")
    pd.DataFrame({"label": Y}).to_parquet(tmp_path / "y.parquet")
    (tmp_path / "y.jsonl").write_text("".join(f'{{"label": {y}}}\n' for y in Y))
    torch.save(torch.from_numpy(Y), tmp_path / "y.pt")
    safetensors.torch.save_file({"y": torch.from_numpy(Y)}, tmp_path / "y.safetensors")
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["a"], file["labels"] = Y * 0, Y
    return sorted(tmp_path.glob("y.*"))


def test_labels_come_from_files_of_any_format(tmp_path):
    np.save(tmp_path / "x.npy", X)
    files = label_files(tmp_path)
    assert len(files) == 11
    for file in files:
        check(load(tmp_path / "x.npy", labels=file))
    check(load(tmp_path / "x.npy", labels=f"{tmp_path / 'y.h5'}::a"), Y * 0)
    rows = np.array([[1, label % 1000] for label in Y], "<i4")
    rows.tofile(tmp_path / "z.ivecs")
    check(load(tmp_path / "x.npy", labels=tmp_path / "z.ivecs"), Y % 1000)


@pytest.mark.usefixtures("tried")
def test_one_long_label_in_every_format(tmp_path):
    labels = ["a"] * (ROWS - 1) + [LONG]
    pq.write_table(arrow_table(["a"] * ROWS), tmp_path / "ok.parquet")
    pq.write_table(arrow_table(labels), tmp_path / "one.parquet")
    pq.write_table(arrow_table(labels), tmp_path / "plain.parquet", use_dictionary=False)
    pa.feather.write_feather(arrow_table(labels), str(tmp_path / "one.feather"))
    lines = [json.dumps({"e": [0, 1], "label": name}) for name in labels]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    np.save(tmp_path / "v.npy", ZEROS)
    (tmp_path / "y.txt").write_text("\n".join(labels))
    (tmp_path / "y.json").write_text(json.dumps(labels))
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["x"] = ZEROS
        file["labels"] = labels
    names = [tmp_path / n for n in ("one.parquet", "plain.parquet", "one.feather", "one.jsonl")]
    names += [tmp_path / "one.h5", f"{tmp_path}/v.npy|{tmp_path}/y.txt"]
    names += [f"{tmp_path}/v.npy|{tmp_path}/y.json"]
    assert measure(tmp_path / "ok.parquet", *names) == [""] * len(names)
    found = load(tmp_path / "one.parquet").splits["test"].labels
    assert found.tolist() == labels


def whole_files(folder):
    hdf5.write(folder / "own.h5", {"test": Split(BIG_X, BIG_Y)})
    with h5py.File(folder / "plain.h5", "w") as file:
        file.create_dataset("x", data=BIG_X, chunks=(64, 16), compression="gzip")
    np.save(folder / "a.npy", BIG_X)
    np.savez(folder / "stored.npz", x=BIG_X, y=BIG_Y)
    np.savez_compressed(folder / "deflated.npz", x=BIG_X, y=BIG_Y)
    table = pa.table({"e": BIG_X.tolist(), "label": BIG_Y})
    pq.write_table(table, folder / "a.parquet")
    pa.feather.write_feather(table, str(folder / "a.feather"))
    pa.feather.write_feather(table, str(folder / "plain.arrow"), compression="uncompressed")
    torch.save({"x": torch.from_numpy(BIG_X), "y": torch.from_numpy(BIG_Y)}, folder / "a.pt")
    old = folder / "old.pt"
    torch.save({"x": torch.from_numpy(BIG_X)}, old, _use_new_zipfile_serialization=False)
    safetensors.numpy.save_file({"x": BIG_X, "y": BIG_Y}, folder / "a.safetensors")
    return sorted(folder.iterdir())


@pytest.mark.usefixtures("tried")
def test_truncated_files_are_errors(tmp_path):
    for path in whole_files(tmp_path):
        load(path)
        data = path.read_bytes()
        for keep in (1, 7, 9, 100, len(data) // 3, len(data) // 2, len(data) - 9):
            path.write_bytes(data[:keep])
            with pytest.raises(DmlError):
                load(path)


@pytest.mark.usefixtures("tried")
def test_damaged_bytes_give_an_error_or_an_array_but_never_anything_else(tmp_path):
    chance = np.random.default_rng(0)
    for path in whole_files(tmp_path):
        data = np.frombuffer(path.read_bytes(), np.uint8)
        for _ in range(12):  # `make fuzz` damages more
            broken = data.copy()
            # Most of the headers and footers lie near the ends.
            places = np.concatenate([chance.integers(0, 400, 4), -chance.integers(1, 400, 4)])
            broken[places] = chance.integers(0, 256, 8)
            path.write_bytes(broken.tobytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = load(path)
                except DmlError:
                    continue
            assert all(split.vectors.ndim == 2 for split in found.splits.values())


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(
    "suffix", [s for format in FORMATS if not format.labels_only for s in format.suffixes]
)
def test_empty_and_meaningless_files_are_errors_in_every_format(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"")
    refused(path, "is empty")
    for content in (b"\0", b"\0" * 1000, b"\xff" * 1000, b"hello, \xe4\n" * 10, b"PK\x03\x04" * 9):
        path.write_bytes(content)
        refused(path, "x" + suffix)


@pytest.mark.usefixtures("tried")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_error(tmp_path):
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "x.npy").chmod(0)
    refused(tmp_path / "x.npy", "cannot be opened")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_named_itself(tmp_path):
    (tmp_path / "x").mkdir(mode=0)
    with pytest.raises(PermissionError) as error:
        load(tmp_path / "x")
    assert error.value.filename == tmp_path / "x"


def test_the_help_of_eval_names_every_format_of_embeddings():
    named = main_suffixes().replace(" or ", ", ").split(", ")
    assert {".h5", ".npy", ".csv", ".parquet"} < set(named)
    assert not {".txt", ".gz"} & set(named)
    text = " ".join(CliRunner().invoke(main, ["eval", "--help"]).stdout.split())
    assert f"FILE is {main_suffixes()};" in text
