"""Small files that would become large or slow: refused, or read in little memory and time.

The promise is ten times the file and 200 MB; every file here is small, so 200 MB is the limit.
"""

import json
import os
import pickle
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats import arrays
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading import load

pytestmark = pytest.mark.usefixtures("tried")

ROOT = Path(__file__).parents[3]
N, LONG = 5000, "b" * 500_000  # padded, 10 GB
X = np.zeros((N, 2), np.float32)
NAMES = ["a"] * (N - 1) + [LONG]
MEASURE = """
import json, resource, sys, time
from retrieval.loading import load
from retrieval.errors import DmlError

def peak():
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024

first, *rest = sys.argv[1:]
load(first)  # the libraries are not part of the promise
base, result = peak(), {}
for name in rest:
    start = time.perf_counter()
    try:
        load(*name.split("|")[:1], labels=(name.split("|") + [None])[1])
        told = ""
    except DmlError as error:
        told = str(error)
    result[name] = (peak() - base, time.perf_counter() - start, told)
print(json.dumps(result))
"""


def measure(*names):
    """For each file, after a harmless one of its kind: bytes taken, seconds, what was told."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, names)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    for name, (taken, seconds, told) in (found := json.loads(run.stdout)).items():
        assert os.path.getsize(name.split("|")[0]) < 2_000_000
        assert taken < 200e6, (name, taken, told)
        assert seconds < 10, (name, seconds, told)  # a second, were the machine idle
    return [told for _, _, told in found.values()]


def table(labels):
    return pa.table({"e": X.tolist(), "label": labels})


def test_one_long_label_in_every_format(tmp_path):
    pq.write_table(table(["a"] * N), tmp_path / "ok.parquet")
    pq.write_table(table(NAMES), tmp_path / "one.parquet")
    pq.write_table(table(NAMES), tmp_path / "plain.parquet", use_dictionary=False)
    pa.feather.write_feather(table(NAMES), str(tmp_path / "one.feather"))
    lines = [json.dumps({"e": [0, 1], "label": name}) for name in NAMES]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    np.save(tmp_path / "v.npy", X)
    (tmp_path / "y.txt").write_text("\n".join(NAMES))
    (tmp_path / "y.json").write_text(json.dumps(NAMES))
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["x"] = X
        file["labels"] = NAMES
    names = [tmp_path / n for n in ("one.parquet", "plain.parquet", "one.feather", "one.jsonl")]
    names += [tmp_path / "one.h5", f"{tmp_path}/v.npy|{tmp_path}/y.txt"]
    names += [f"{tmp_path}/v.npy|{tmp_path}/y.json"]
    assert measure(tmp_path / "ok.parquet", *names) == [""] * len(names)
    found = load(tmp_path / "one.parquet").splits["test"].labels
    assert found.tolist() == NAMES


def test_one_long_text_that_every_row_shares(tmp_path):
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * N, pa.int32()), [LONG])
    pq.write_table(table(["a"] * N), tmp_path / "ok.parquet")
    pq.write_table(table(shared), tmp_path / "all.parquet")
    pa.feather.write_feather(table(shared), str(tmp_path / "all.feather"))
    names = [tmp_path / n for n in ("ok.parquet", "all.parquet", "all.feather")]
    assert measure(*names) == ["", ""]


def test_compressed_arrow_files_that_claim_too_much(tmp_path):
    zeros = pa.array(np.zeros(80_000_000, np.float32))  # 320 MB
    big = pa.table({"f0": zeros, "f1": zeros})
    pa.feather.write_feather(table(["a"] * N), str(tmp_path / "ok.feather"))
    for kind in ("zstd", "lz4"):
        name = str(tmp_path / f"{kind}.feather")
        pa.feather.write_feather(big, name, kind, chunksize=len(zeros))
    with pa.ipc.new_stream(
        tmp_path / "zstd.arrow", big.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as stream:
        stream.write_table(big)
    told = measure(*(tmp_path / n for n in ("ok.feather", "zstd.feather", "zstd.arrow")))
    assert all("claims 640,000,000 bytes" in text for text in told)


def test_compressed_hdf5_text_of_great_width(tmp_path):
    with h5py.File(tmp_path / "ok.h5", "w") as file:
        file["x"] = X
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X[:800]
        options = {"chunks": (10,), "compression": "gzip"}
        labels = file.create_dataset("labels", (800,), "S200000", **options)
        chunk = zlib.compress(bytes(2_000_000))
        for row in range(0, 800, 10):
            labels.id.write_direct_chunk((row,), chunk)
    assert "claims 160,000,000 bytes" in measure(tmp_path / "ok.h5", tmp_path / "x.h5")[0]


@pytest.mark.parametrize("descr", ["|S0", "<U0"])
def test_labels_of_no_length_are_refused(tmp_path, descr):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({10**11},), }}".encode()
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    (tmp_path / "y.npy").write_bytes(head)
    np.save(tmp_path / "v.npy", X)
    with pytest.raises(DmlError, match="header"):
        load(tmp_path / "v.npy", labels=tmp_path / "y.npy")


def torch_file(path, program):
    """A file as torch.save makes it, with a pickle program of our own."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, program if name.endswith("/data.pkl") else data)
    return path


def test_torch_files_that_grow(tmp_path):
    x = torch.zeros(4, 2)
    torch.save({"x": x}, tmp_path / "ok.pt")
    nest: dict = {"x": x}
    for _ in range(3):
        nest = {f"k{n}": nest for n in range(300)}
    torch.save(nest, tmp_path / "shared.pt")
    torch.save({"x": x[:1].expand(10**9, 2)}, tmp_path / "stride.pt")
    array = b"\x80\x02cbuiltins\nbytearray\n(J" + (2 * 10**9).to_bytes(4, "little") + b"tR."
    torch_file(tmp_path / "bytes.pt", array)
    key: tuple = ()
    for _ in range(60):
        key = (key, key)
    torch_file(tmp_path / "key.pt", pickle.dumps([key], 2))
    names = [tmp_path / f"{n}.pt" for n in ("shared", "stride", "bytes", "key")]
    shared, stride, array, key = measure(tmp_path / "ok.pt", *names)
    assert shared == ""  # one tensor, found once
    assert "not plausible" in stride
    assert "too much memory" in array
    assert "no 2-D array" in key


@pytest.mark.parametrize("name", ["x.h5", "x.npz"])
def test_paths_that_are_much_alike_are_not_taken_for_a_bomb(tmp_path, monkeypatch, name):
    """They shrink to a hundredth, but a file of as many vectors is large anyway."""
    monkeypatch.setattr(arrays, "ROOM_BYTES", 1 << 16)
    paths = np.array([f"{'folder/' * 100}{n:05}.jpg" for n in range(2000)])
    x = np.random.default_rng(0).standard_normal((2000, 256)).astype("f4")
    if name == "x.h5":
        hdf5.write(tmp_path / name, {"test": Split(x, np.arange(2000) % 9, paths)})
    else:
        np.savez_compressed(tmp_path / name, embeddings=x, labels=np.arange(2000) % 9, paths=paths)
    found = load(tmp_path / name).splits["test"]
    assert found.paths.tolist() == paths.tolist()
    with h5py.File(tmp_path / "y.h5", "w") as file:  # numbers are held to their own size
        file["x"] = x
        file.create_dataset("labels", data=np.zeros(2000, "i8"), chunks=(2000,))
        file.create_dataset("y", data=np.zeros((2000, 256), "f4"), compression="gzip")
    with pytest.raises(DmlError, match="h5repack -f NONE"):
        load(f"{tmp_path / 'y.h5'}::y")


def test_the_arrays_of_a_file_share_one_budget(tmp_path, monkeypatch):
    """Each array of the file would be let pass alone."""
    monkeypatch.setattr(arrays, "ROOM_BYTES", 1 << 20)
    path = tmp_path / "x.npz"
    names = np.array([f"{n:0100d}" for n in range(2000)])  # 800 KB of zeros and numbers
    np.savez_compressed(path, embeddings=np.zeros((2000, 100), np.float32), labels=names)
    with pytest.raises(DmlError, match=r"claims .* bytes of data"):
        load(path)
    monkeypatch.setattr(arrays, "ROOM_BYTES", 1 << 21)
    assert len(load(path).splits["test"].labels) == 2000
