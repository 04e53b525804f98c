"""Damaged and hostile files: a clear error within a second, and nothing is ever executed."""

import io
import json
import os
import pickle
import struct
import time
import warnings
import zipfile
import zlib

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats import FORMATS
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading import load

pytestmark = pytest.mark.usefixtures("tried")

X = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
Y = np.arange(300) // 3
HUGE = 10**12


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def refused():
    """Asserts that loading fails with a DmlError, quickly."""

    def check(source, match, **options):
        start = time.perf_counter()
        with pytest.raises(DmlError, match=match) as error:
            load(source, **options)
        # A second is the promise; the first import of a library is not part of it.
        assert time.perf_counter() - start < 5
        return error.value

    return check


def npy_header(shape, descr="'<f4'"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        (f"({HUGE}, 512)", "claims"),
        ("(2, 1000)", "claims"),
        ("(-1, 4)", "header"),
        ("(nan, 4)", "header"),
        ("(1e3, 4)", "header"),
        (f"({2**80}, 4)", "claims|header"),
        ("(4,", "header"),
    ],
)
def test_npy_with_a_false_shape(tmp_path, refused, shape, match):
    (tmp_path / "x.npy").write_bytes(npy_header(shape) + b"\0" * 64)
    refused(tmp_path / "x.npy", match)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("embeddings.npy", npy_header(shape) + b"\0" * 64)
    refused(tmp_path / "x.npz", match + "|no 2-D array")


def test_pickled_arrays_are_never_unpickled(tmp_path, refused):
    trap = tmp_path / "trap"
    objects = np.empty((2, 2), object)
    objects[:] = Payload(trap)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=objects, allow_pickle=True)
    refused(tmp_path / "x.npy", "pickled")
    refused(f"{tmp_path / 'x.npz'}::x", "pickled")
    np.save(tmp_path / "v.npy", X)
    refused(tmp_path / "v.npy", "pickled", labels=tmp_path / "x.npy")
    assert not trap.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_classes_in_torch_files_never_run(tmp_path, refused, zipped):
    trap = tmp_path / "trap"
    content = {"embeddings": torch.from_numpy(X), "extra": Payload(trap)}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "x.pt", "never done")
    (tmp_path / "y.pt").write_bytes(pickle.dumps(Payload(trap)))
    refused(tmp_path / "y.pt", "y.pt")
    assert not trap.exists()


def test_a_zip_bomb_is_refused(tmp_path, refused):
    shape = (20 << 14, 256)  # 335 MB of zeros in 330 kB
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as file,
        file.open("embeddings.npy", "w", force_zip64=True) as member,
    ):
        member.write(npy_header(shape))
        for _ in range(20):
            member.write(bytes(1 << 24))
    assert os.path.getsize(tmp_path / "x.npz") < 1_000_000
    refused(tmp_path / "x.npz", "not plausible")


def test_a_zip_that_lies_about_its_sizes_is_refused(tmp_path, refused):
    buffer = io.BytesIO()
    np.savez(buffer, embeddings=X)
    data = bytearray(buffer.getvalue())
    at = data.rindex(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 31, 1 << 31)
    (tmp_path / "x.npz").write_bytes(data)
    refused(tmp_path / "x.npz", "claims|cannot be read")


@pytest.mark.parametrize("layout", ["contiguous", "chunked", "compressed", "partly"])
def test_hdf5_that_claims_rows_it_does_not_store(tmp_path, refused, layout):
    options = {"contiguous": {}, "chunked": {"chunks": (1024, 512)}}
    options["compressed"] = options["partly"] = {"chunks": (1024, 512), "compression": "gzip"}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = 10**7 if layout == "partly" else HUGE
        data = file.create_dataset("x", (rows, 512), "f4", **options[layout])
        if layout == "partly":
            data[:1024] = 1
    assert os.path.getsize(tmp_path / "x.h5") < 1_000_000
    refused(tmp_path / "x.h5", "claims|chunks")


def test_an_hdf5_bomb_is_refused(tmp_path, refused):
    chunk = zlib.compress(bytes(1 << 22))  # 4 MB of zeros, stored 256 times over
    with h5py.File(tmp_path / "x.h5", "w") as file:
        options = {"chunks": (1 << 10, 1 << 10), "compression": "gzip"}
        data = file.create_dataset("x", (1 << 18, 1 << 10), "f4", **options)
        for row in range(0, 1 << 18, 1 << 10):
            data.id.write_direct_chunk((row, 0), chunk)
    refused(tmp_path / "x.h5", "not plausible")


def test_hdf5_that_reaches_out_of_the_file_is_refused(tmp_path, refused):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = X
    X.tofile(tmp_path / "secret.bin")
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("secret.h5", "x")
    with h5py.File(tmp_path / "soft.h5", "w") as file:
        file["deep/out"] = h5py.ExternalLink("secret.h5", "/")
        file["x"] = h5py.SoftLink("/deep/out/x")
    with h5py.File(tmp_path / "storage.h5", "w") as file:
        file.create_dataset("x", X.shape, "f4", external=[(tmp_path / "secret.bin", 0, X.nbytes)])
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout(X.shape, "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "x", X.shape)
        file.create_virtual_dataset("x", layout)
    for name in ("link", "soft", "storage", "virtual"):
        error = refused(tmp_path / f"{name}.h5", "not followed")
        assert "secret" in error.what or name == "storage"
        refused(f"{tmp_path / name}.h5::x", "not followed")


def test_own_files_that_link_outwards_are_refused(tmp_path, refused):
    hdf5.write(tmp_path / "secret.h5", {"test": Split(X, Y)})
    hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y)})
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["test/embeddings"]
        file["test/embeddings"] = h5py.ExternalLink("secret.h5", "test/embeddings")
    refused(tmp_path / "x.h5", "not followed")


def test_a_virtual_data_set_inside_the_file_is_read(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["parts/a"] = X
        layout = h5py.VirtualLayout(X.shape, "f4")
        layout[:] = h5py.VirtualSource(".", "parts/a", X.shape)
        file.create_virtual_dataset("all", layout)
    np.testing.assert_array_equal(load(f"{tmp_path / 'x.h5'}::all").splits["test"].vectors, X)


def safetensors_file(path, header, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([HUGE, 4], [0, HUGE * 16]),
        ([4, 4], [0, 32]),
        ([-4, -4], [0, 64]),
        ([4, 4], [64, 0]),
        ([4.0, 4], [0, 64]),
        ([float("nan"), 4], [0, 64]),
        ([4, 4], [0]),
        ("ab", [0, 64]),
    ],
)
def test_safetensors_with_false_offsets(tmp_path, refused, shape, offsets):
    info = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    safetensors_file(tmp_path / "x.safetensors", {"x": info})
    refused(tmp_path / "x.safetensors", "x.safetensors")


def test_safetensors_with_a_false_header(tmp_path, refused):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    safetensors_file(tmp_path / "b.safetensors", b"[" * 100_000)
    safetensors_file(tmp_path / "c.safetensors", b"[]")
    safetensors_file(tmp_path / "d.safetensors", b"\xff\xfe")
    safetensors_file(tmp_path / "e.safetensors", {"x": 3})
    for name in "abcde":
        refused(tmp_path / f"{name}.safetensors", f"{name}.safetensors")


@pytest.mark.parametrize("length", [0, -1, 2**31 - 1, 17])
def test_vecs_with_a_false_length(tmp_path, refused, length):
    (tmp_path / "x.fvecs").write_bytes(struct.pack("<i", length) + b"\0" * 64)
    refused(tmp_path / "x.fvecs", "claims")


def test_vecs_with_rows_of_different_lengths(tmp_path, refused):
    rows = np.array([[1, 5], [2, 5], [1, 5]], "<i4")
    rows.tofile(tmp_path / "x.fvecs")
    refused(tmp_path / "x.fvecs", "different lengths")


def test_a_parquet_that_claims_many_rows_of_nothing_is_refused(tmp_path, refused):
    rows = 1_100_000  # run-length encoding stores a constant column in a few bytes
    table = pa.table({f"f{n}": np.zeros(rows, np.float32) for n in range(64)})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    assert os.path.getsize(tmp_path / "x.parquet") < 1_000_000
    refused(tmp_path / "x.parquet", "not plausible")


def test_csv_bombs_of_columns_and_lines_take_no_memory(tmp_path, refused):
    wide = ",".join(["1"] * 20_000)
    (tmp_path / "x.csv").write_text(wide + "\n" + "\n" * 1_000_000)
    found = load(tmp_path / "x.csv").splits["test"].vectors
    assert found.shape == (1, 20_000)
    assert found.base is None or found.base.nbytes < 50 * os.path.getsize(tmp_path / "x.csv")
    (tmp_path / "y.csv").write_text('a,b\n"1,2\n' + "1,2\n" * 1_500_000)
    refused(tmp_path / "y.csv", "line")


def whole_files(folder):
    hdf5.write(folder / "own.h5", {"test": Split(X, Y)})
    with h5py.File(folder / "plain.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(64, 16), compression="gzip")
    np.save(folder / "a.npy", X)
    np.savez(folder / "stored.npz", x=X, y=Y)
    np.savez_compressed(folder / "deflated.npz", x=X, y=Y)
    table = pa.table({"e": X.tolist(), "label": Y})
    pq.write_table(table, folder / "a.parquet")
    pa.feather.write_feather(table, str(folder / "a.feather"))
    pa.feather.write_feather(table, str(folder / "plain.arrow"), compression="uncompressed")
    torch.save({"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}, folder / "a.pt")
    old = folder / "old.pt"
    torch.save({"x": torch.from_numpy(X)}, old, _use_new_zipfile_serialization=False)
    safetensors.numpy.save_file({"x": X, "y": Y}, folder / "a.safetensors")
    return sorted(folder.iterdir())


def test_truncated_files_are_errors(tmp_path):
    for path in whole_files(tmp_path):
        load(path)
        data = path.read_bytes()
        for keep in (1, 7, 9, 100, len(data) // 3, len(data) // 2, len(data) - 9):
            path.write_bytes(data[:keep])
            with pytest.raises(DmlError):
                load(path)


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


@pytest.mark.parametrize(
    "suffix", [s for format in FORMATS if not format.labels_only for s in format.suffixes]
)
def test_empty_and_meaningless_files_are_errors_in_every_format(tmp_path, refused, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"")
    refused(path, "is empty")
    for content in (b"\0", b"\0" * 1000, b"\xff" * 1000, b"hello, \xe4\n" * 10, b"PK\x03\x04" * 9):
        path.write_bytes(content)
        refused(path, "x" + suffix)


def test_things_that_are_not_files_are_errors(tmp_path, refused):
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "folder.h5" / "inside.md").write_text("x")
    assert "inside.md" in refused(tmp_path / "folder.h5", "is a folder").why
    os.mkfifo(tmp_path / "pipe.npy")
    refused(tmp_path / "pipe.npy", "not a regular file")
    np.save(tmp_path / "embeddings.npy", X)
    assert "embeddings.npy" in refused(tmp_path / "embedings.npy", "does not exist").fix
    refused(tmp_path / "nowhere" / "x.npy", "folder .*nowhere does not exist either")
    refused("x\0.npy", "does not exist|cannot be opened")
    (tmp_path / "x.cvs").write_text("hello")
    error = refused(tmp_path / "x.cvs", "suffix .cvs")
    assert ".safetensors" in error.why
    assert ".csv" in error.fix
    (tmp_path / "y.txt").write_text("1")
    refused(tmp_path / "y.txt", "labels only")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_error(tmp_path, refused):
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "x.npy").chmod(0)
    refused(tmp_path / "x.npy", "cannot be opened")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_wrong_checksum_in_an_npz_is_an_error(tmp_path, refused, save):
    save(tmp_path / "x.npz", embeddings=X, labels=Y)
    load(tmp_path / "x.npz")
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[2000] ^= 1  # inside the vectors
    (tmp_path / "x.npz").write_bytes(data)
    refused(tmp_path / "x.npz", "damaged|Bad CRC|Error -3")


def test_an_npz_member_that_goes_on_after_its_end_is_an_error(tmp_path, refused):
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", kind) as file:
            file.writestr("embeddings.npy", npy_header("(4, 4)") + bytes(100))
        refused(tmp_path / "x.npz", "100 bytes for 64")


@pytest.mark.parametrize("order", "<>")
def test_numbers_that_are_no_characters_are_refused(tmp_path, refused, order):
    labels = np.array([f"{n}é" for n in range(300)], f"{order}U4")
    np.save(tmp_path / "y.npy", labels)
    np.save(tmp_path / "x.npy", X)
    found = load(tmp_path / "x.npy", labels=tmp_path / "y.npy").splits["test"].labels
    assert found.tolist() == labels.tolist()
    data = bytearray((tmp_path / "y.npy").read_bytes())
    struct.pack_into(f"{order}I", data, len(data) - 16 * 20, 0x110000)
    (tmp_path / "y.npy").write_bytes(data)
    refused(tmp_path / "x.npy", "0x110000 as a character, in row 280", labels=tmp_path / "y.npy")


@pytest.mark.parametrize("suffix", ["parquet", "feather", "h5", "pt"])
def test_labels_that_differ_in_a_zero_at_the_end_are_not_merged(tmp_path, refused, suffix):
    names, path = ["a", "a\0"] * 150, tmp_path / f"x.{suffix}"
    if suffix == "h5":
        with h5py.File(path, "w") as file:  # in HDF5 itself a text ends at its first zero
            file["x"] = X
            file["labels"] = np.array(names, "S2")
        assert set(load(path).splits["test"].labels.tolist()) == {"a"}
        return
    if suffix == "pt":
        torch.save({"x": torch.from_numpy(X), "labels": names}, path)
    else:
        write = pq.write_table if suffix == "parquet" else pa.feather.write_feather
        write(pa.table({"e": X.tolist(), "label": names}), str(path))
    refused(path, "ends in a zero character, in row 1")


def test_arrow_files_that_claim_more_than_memory_are_called_damaged(tmp_path, monkeypatch):
    table = pa.table({"e": X.tolist(), "label": Y})
    pa.feather.write_feather(table, str(tmp_path / "x.feather"), compression="zstd")
    data = (tmp_path / "x.feather").read_bytes()
    for trial in "01":
        monkeypatch.setenv("DMLTOOL_TRIAL", trial)
        for size in (X.size * 8, len(Y) * 8):  # the claim at the start of a compressed buffer
            at = data.index(struct.pack("<q", size) + b"\x28\xb5\x2f\xfd")
            for claim in (1 << 45, 1 << 62, -7):
                broken = bytearray(data)
                struct.pack_into("<q", broken, at, claim)
                (tmp_path / "x.feather").write_bytes(broken)
                with pytest.raises(DmlError, match=r"claims|cannot be read"):
                    load(tmp_path / "x.feather")


def test_arrow_lists_that_begin_outside_their_values_are_refused(tmp_path, refused):
    """Arrow itself looks only where it is asked to, and ends the process when it is used."""
    places = np.arange(301, dtype=np.int32) * 16
    rows = pa.ListArray.from_arrays(pa.array(places), pa.array(X.ravel()))
    batch = pa.RecordBatch.from_arrays([rows, pa.array(Y)], ["embedding", "label"])
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), batch.schema) as out:
        out.write_batch(batch)
    data = (tmp_path / "x.arrow").read_bytes()
    assert data.count(places.tobytes()) == 1
    (tmp_path / "x.arrow").write_bytes(data.replace(places.tobytes(), (places + 9000).tobytes()))
    refused(tmp_path / "x.arrow", "out of bounds")
