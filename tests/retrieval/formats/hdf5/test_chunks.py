"""Chunked and virtual HDF5 data sets: whole ones are read, all others are errors."""

import struct
import zlib

import h5py
import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.formats.hdf5 import chunks
from retrieval.loading.load import load

CHANCE = np.random.default_rng(0)
X = CHANCE.standard_normal((300, 16)).astype(np.float32)
ONE = {"chunks": X.shape, "shape": X.shape, "dtype": "f4"}


def vectors(path, key="x"):
    return load(f"{path}::{key}").splits["test"].vectors


def with_chunk(path, data, **options):
    """A file of one chunk whose stored bytes are `data`."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", **ONE, **options).id.write_direct_chunk((0, 0), data)
    return path


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8", "u1", "<i8"])
def test_every_filter_gives_what_was_written(tmp_path, compression, shuffle, checksum, dtype):
    array = (20 * X).round().astype(np.int8).astype(dtype)
    options = {"compression": compression, "shuffle": shuffle, "fletcher32": checksum}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(64, 5), **options)
        file.create_dataset("labels", data=np.arange(300), chunks=(7,), **options)
    found = load(tmp_path / "x.h5").splits["test"]
    np.testing.assert_array_equal(found.vectors, array)
    np.testing.assert_array_equal(found.labels, np.arange(300))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1001, 4 << 20])
@pytest.mark.parametrize("fill", [0, 255, None])
def test_the_checksum_is_that_of_hdf5(tmp_path, size, fill):
    data = np.full(size, fill, "u1") if fill is not None else CHANCE.integers(0, 256, size, "u1")
    if not size:
        assert chunks.fletcher32(b"") == 0
        return
    with h5py.File(tmp_path / "x.h5", "w") as file:
        stored = file.create_dataset("x", data=data, chunks=(size,), fletcher32=True)
        file.flush()
        raw = stored.id.read_direct_chunk((0,))[1]
    assert chunks.fletcher32(data.tobytes()) == int.from_bytes(raw[-4:], "little")


def test_a_chunk_stored_without_its_filter_is_read(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        stored = file.create_dataset("x", **ONE, compression="gzip", shuffle=True)
        shuffled = X.view("u1").reshape(-1, 4).T.tobytes()
        stored.id.write_direct_chunk((0, 0), shuffled, filter_mask=2)  # without gzip
    np.testing.assert_array_equal(vectors(tmp_path / "x.h5"), X)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (X[:20].tobytes(), {}),
        (X.tobytes() + b"more", {}),
        (zlib.compress(X[:20].tobytes()), {"compression": "gzip"}),
        (zlib.compress(X.tobytes() + b"more"), {"compression": "gzip"}),
        (zlib.compress(X.tobytes())[:-9], {"compression": "gzip"}),
        (b"ab", {"fletcher32": True}),
        (X.tobytes() + b"\0\0\0\0", {"fletcher32": True}),
        (b"\x03abcd", {"compression": "lzf"}),
        (b"\xe0\xff\xff", {"compression": "lzf"}),
        (b"\x03ab", {"compression": "lzf"}),
    ],
)
def test_a_chunk_that_is_not_whole_is_an_error_and_not_heap_garbage(tmp_path, data, options):
    with pytest.raises(DmlError, match="damaged chunk"):
        vectors(with_chunk(tmp_path / "x.h5", data, **options))


def test_a_chunk_longer_than_its_buffer_is_not_read(tmp_path):
    """HDF5 would write beyond the end of the buffer that h5py has made for it."""

    class Untouchable:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            assert name != "read_direct_chunk"
            found = getattr(self.real, name)
            return Untouchable(found) if name == "id" else found

    path = with_chunk(tmp_path / "x.h5", X.tobytes() * 10)
    with h5py.File(path) as file, pytest.raises(DmlError, match="damaged chunk"):
        list(chunks.blocks(Untouchable(file["x"]), 4, path, "x"))


def test_a_short_chunk_of_text_is_an_error(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
        options = {"chunks": (300,), "compression": "gzip"}
        for name, dtype in (("labels", "S8"), ("paths", h5py.string_dtype())):
            stored = file.create_dataset(name, (300,), dtype, **options)
            stored.id.write_direct_chunk((0,), zlib.compress(b"abc"))
    for key in ("x,labels", "x,paths"):
        with pytest.raises(DmlError, match="damaged chunk"):
            load(f"{tmp_path / 'x.h5'}::{key}")


def test_a_chunk_at_a_place_outside_the_array_does_not_stand_for_a_missing_one(tmp_path):
    """As many chunks as there should be; HDF5 would read zeros for the one that is elsewhere."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(100, 16))
    data = (tmp_path / "x.h5").read_bytes()
    place = struct.pack("<QQQ", 200, 0, 0)  # of the last chunk, in the tree of chunks
    assert data.count(place) == 1
    (tmp_path / "x.h5").write_bytes(data.replace(place, struct.pack("<QQQ", 900, 0, 0)))
    with pytest.raises(DmlError, match="only 2 of 3 chunks"):
        vectors(tmp_path / "x.h5")


@pytest.mark.parametrize("claimed", [4800, 10**9])
def test_filters_that_cannot_be_checked_are_refused_with_a_way_out(tmp_path, claimed):
    """HDF5 would write as many numbers as a damaged filter claims, beyond the end of its buffer."""
    numbers = np.arange(4800).reshape(X.shape)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=numbers, chunks=X.shape, scaleoffset=0)
    data = (tmp_path / "x.h5").read_bytes()
    options = struct.pack("<4I", 2, 0, 4800, 0)  # for integers, bits, numbers in a chunk, class
    assert data.count(options) == 1
    (tmp_path / "x.h5").write_bytes(data.replace(options, struct.pack("<4I", 2, 0, claimed, 0)))
    with pytest.raises(DmlError, match="filter scaleoffset") as error:
        vectors(tmp_path / "x.h5")
    assert "h5repack" in error.value.fix
