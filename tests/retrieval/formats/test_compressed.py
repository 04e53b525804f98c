"""Files compressed by gzip and zstd."""

import base64
import gzip
import json
import os
import sys
import tempfile

import numpy as np
import pandas as pd
import pyarrow
import pytest

from retrieval.formats import compressed
from retrieval.loading.load import load
from tests.retrieval.formats.samples import refused

X = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
Y = np.arange(30) // 3


def table():
    return pd.DataFrame(X, columns=list("abcd")).assign(label=Y)


def test_files_compressed_by_gzip_are_read(tmp_path):
    with gzip.open(tmp_path / "x.npy.gz", "wb") as file:
        np.save(file, X)
    with gzip.open(tmp_path / "y.txt.gz", "wt") as file:
        file.write("\n".join(map(str, Y)))
    table().to_csv(tmp_path / "x.csv.gz", index=False)
    table().to_csv(tmp_path / "x.tsv.gz", index=False, sep="\t")
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        for x, y in zip(X.tolist(), Y.tolist(), strict=True):
            file.write(json.dumps({"e": x, "y": y}) + "\n")
    for name in ("x.npy.gz", "x.csv.gz", "x.tsv.gz", "x.jsonl.gz", "X.CSV.GZ"):
        if name.isupper():
            (tmp_path / "x.csv.gz").rename(tmp_path / name)
        labels = tmp_path / "y.txt.gz" if "npy" in name else None
        found = load(tmp_path / name, labels=labels)
        assert found.source == tmp_path / name
        np.testing.assert_array_equal(found.splits["test"].vectors.astype(np.float32), X)
        np.testing.assert_array_equal(found.splits["test"].labels, Y)


def test_messages_and_notes_about_gzip_files_name_them(tmp_path):
    (tmp_path / "x.csv.gz").write_bytes(
        gzip.compress("d0,d1,label\n1,2,\xfc\n1,x,a\n".encode("latin-1"))
    )
    error = refused(tmp_path / "x.csv.gz", "line 3")
    assert error.what.startswith(f"{tmp_path / 'x.csv.gz'}, line 3")
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress("d0,d1,label\n1,2,\xfc\n".encode("latin-1")))
    (note,) = load(tmp_path / "x.csv.gz").notes
    assert note.startswith(f"{tmp_path / 'x.csv.gz'} is not UTF-8")


def test_nothing_is_left_of_the_inflated_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with gzip.open(tmp_path / "x.npy.gz", "wb") as file:
        np.save(file, X)
    found = load(tmp_path / "x.npy.gz")
    assert not list((tmp_path / "tmp").iterdir())
    np.testing.assert_array_equal(found.splits["test"].vectors, X)
    (tmp_path / "x.npy.gz").write_bytes(gzip.compress(b"no array"))
    refused(tmp_path / "x.npy.gz", "x.npy.gz")
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="such files need a name there")
def test_a_kill_leaves_nothing_of_the_inflated_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"d0,d1,label\n1,2,a\n"))
    with compressed.inflated(tmp_path / "x.csv.gz") as file:
        assert not list((tmp_path / "tmp").iterdir())
        assert file.read_text() == "d0,d1,label\n1,2,a\n"


def test_a_compressed_table_whose_numbers_would_take_too_much_is_refused(tmp_path):
    """48 MB of text in 4 MB are allowed; the 192 MB of numbers in them are not."""
    noise = base64.b85encode(np.random.default_rng(0).bytes(3_300_000)).decode()
    names = ",".join(f"d{n}" for n in range(100))
    row = "0," * 100
    with gzip.open(tmp_path / "x.csv.gz", "wt", compresslevel=1) as file:
        file.write(f"{names},label\n{row}a\n" + f"{row}a\n" * 240_000)
        file.write(f'{row}"{noise}"\n')
    error = refused(tmp_path / "x.csv.gz", "x.csv.gz claims .* bytes of data but stores")
    assert str(os.path.getsize(tmp_path / "x.csv.gz"))[:1] == error.what.split("stores ")[1][:1]


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def test_zstd_files_are_read(tmp_path):
    np.save(tmp_path / "x.npy", X)
    whole = (tmp_path / "x.npy").read_bytes()
    # Two frames one after the other are one file, as zstd itself has it.
    (tmp_path / "x.npy.zst").write_bytes(zstd(whole[:100]) + zstd(whole[100:]))
    (tmp_path / "y.txt.zst").write_bytes(zstd("\n".join(map(str, Y)).encode()))
    found = load(tmp_path / "x.npy.zst", labels=tmp_path / "y.txt.zst").splits["test"]
    np.testing.assert_array_equal(found.vectors, X)
    np.testing.assert_array_equal(found.labels, Y)
    (tmp_path / "x.npy").unlink()
    (tmp_path / "x2.npy.zst").write_bytes(zstd(whole))  # shards, in natural order
    (tmp_path / "x10.npy.gz").write_bytes(gzip.compress(whole))
    found = load(tmp_path / "x*.npy.*").splits["test"]
    np.testing.assert_array_equal(found.vectors, np.concatenate([X, X, X]))


def test_zstd_files_that_are_cut_huge_or_of_other_formats_are_refused(tmp_path):
    data = zstd(np.random.default_rng(0).bytes(5000))
    (tmp_path / "x.npy.zst").write_bytes(data[:-9])
    assert "Truncated" in refused(tmp_path / "x.npy.zst", "cannot be inflated").why
    (tmp_path / "x.npy.zst").write_bytes(zstd(bytes(100 << 20)))
    refused(tmp_path / "x.npy.zst", "not plausible")
    (tmp_path / "x.h5.zst").write_bytes(data)
    assert "unzstd" in refused(tmp_path / "x.h5.zst", "compressed by zstd").fix
    (tmp_path / "x.npy").write_bytes(data)
    assert refused(tmp_path / "x.npy", r"is a \.zst file").fix.endswith("x.npy.zst")


def test_a_gzip_bomb_is_refused(tmp_path):
    with gzip.open(tmp_path / "x.npy.gz", "wb") as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
    refused(tmp_path / "x.npy.gz", "not plausible")


def test_damaged_gzip_files_and_other_content_are_errors(tmp_path):
    data = gzip.compress(table().to_csv(index=False).encode())
    for n, damaged in enumerate((data[:-9], data[:40], b"no gzip", data[:50] + b"x" + data[51:])):
        (tmp_path / f"{n}.csv.gz").write_bytes(damaged)
        refused(tmp_path / f"{n}.csv.gz", "cannot be inflated")
    (tmp_path / "x.h5.gz").write_bytes(data)
    assert "gunzip -k" in refused(tmp_path / "x.h5.gz", "compressed by gzip").fix
    (tmp_path / "y.txt.gz").write_bytes(data)
    refused(tmp_path / "y.txt.gz", "labels only")
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress(b""))
    refused(tmp_path / "e.csv.gz", "is empty")
