"""Data sets of HDF5: links, virtual ones, and those that claim more than the file stores."""

import os
import zlib

import h5py
import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load
from tests.retrieval.formats.samples import (
    BIG_X,
    BIG_Y,
    HUGE,
    NAMES,
    ZEROS,
    X,
    Y,
    check,
    measure,
    only,
    refused,
)


def test_groups_and_soft_links_inside_hdf5_are_followed(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["deep/er/vectors"] = X
        file["deep/er/label"] = [name.encode() for name in NAMES]
        file["alias"] = h5py.SoftLink("/deep/er/vectors")
        file["deep/self"] = file["deep"]
    check(load(f"{tmp_path / 'x.h5'}::deep"), NAMES)


def test_big_endian_numbers_are_converted(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=X, dtype=">f4")
        file.create_dataset("y", data=Y, dtype=">i8")
    found = load(tmp_path / "x.h5")
    check(found)
    assert only(found).vectors.dtype.isnative


def test_bfloat16_becomes_float32(tmp_path):
    bits = (X.view(np.uint32) >> 16).astype(np.uint16)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = bits.view("V2")
    found = only(load(tmp_path / "x.h5")).vectors
    np.testing.assert_array_equal(found, (bits.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("layout", ["contiguous", "chunked", "compressed", "partly"])
def test_hdf5_that_claims_rows_it_does_not_store(tmp_path, layout):
    options = {"contiguous": {}, "chunked": {"chunks": (1024, 512)}}
    options["compressed"] = options["partly"] = {"chunks": (1024, 512), "compression": "gzip"}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        rows = 10**7 if layout == "partly" else HUGE
        data = file.create_dataset("x", (rows, 512), "f4", **options[layout])
        if layout == "partly":
            data[:1024] = 1
    assert os.path.getsize(tmp_path / "x.h5") < 1_000_000
    refused(tmp_path / "x.h5", "claims|chunks")


@pytest.mark.usefixtures("tried")
def test_an_hdf5_bomb_is_refused(tmp_path):
    chunk = zlib.compress(bytes(1 << 22))  # 4 MB of zeros, stored 256 times over
    with h5py.File(tmp_path / "x.h5", "w") as file:
        options = {"chunks": (1 << 10, 1 << 10), "compression": "gzip"}
        data = file.create_dataset("x", (1 << 18, 1 << 10), "f4", **options)
        for row in range(0, 1 << 18, 1 << 10):
            data.id.write_direct_chunk((row, 0), chunk)
    refused(tmp_path / "x.h5", "not plausible")


@pytest.mark.usefixtures("tried")
def test_compressed_hdf5_text_of_great_width(tmp_path):
    with h5py.File(tmp_path / "ok.h5", "w") as file:
        file["x"] = ZEROS
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = ZEROS[:800]
        options = {"chunks": (10,), "compression": "gzip"}
        labels = file.create_dataset("labels", (800,), "S200000", **options)
        chunk = zlib.compress(bytes(2_000_000))
        for row in range(0, 800, 10):
            labels.id.write_direct_chunk((row,), chunk)
    assert "claims 160,000,000 bytes" in measure(tmp_path / "ok.h5", tmp_path / "x.h5")[0]


@pytest.mark.parametrize("chunks", [None, (1000,)])
def test_one_long_text_for_every_row_takes_no_memory(tmp_path, chunks):
    """Many rows may point at one text in the heap; HDF5 would copy it for each of them."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros((1000, 2), "f4")
        text = h5py.string_dtype()
        labels = file.create_dataset("labels", (1000,), text, chunks=chunks)
        labels[0] = "a" * 300_000
        file.flush()
        if chunks:
            one = labels.id.read_direct_chunk((0,))[1][:16]
            labels.id.write_direct_chunk((0,), one * 1000)
        at = labels.id.get_offset()
    if not chunks:
        data = bytearray((tmp_path / "x.h5").read_bytes())
        data[at : at + 16_000] = data[at : at + 16] * 1000
        (tmp_path / "x.h5").write_bytes(data)
    with pytest.raises(DmlError, match="claims 300,000,000 bytes"):
        load(tmp_path / "x.h5")


@pytest.mark.usefixtures("tried")
def test_hdf5_that_reaches_out_of_the_file_is_refused(tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = BIG_X
    BIG_X.tofile(tmp_path / "secret.bin")
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("secret.h5", "x")
    with h5py.File(tmp_path / "soft.h5", "w") as file:
        file["deep/out"] = h5py.ExternalLink("secret.h5", "/")
        file["x"] = h5py.SoftLink("/deep/out/x")
    with h5py.File(tmp_path / "storage.h5", "w") as file:
        file.create_dataset(
            "x", BIG_X.shape, "f4", external=[(tmp_path / "secret.bin", 0, BIG_X.nbytes)]
        )
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout(BIG_X.shape, "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "x", BIG_X.shape)
        file.create_virtual_dataset("x", layout)
    for name in ("link", "soft", "storage", "virtual"):
        error = refused(tmp_path / f"{name}.h5", "not followed")
        assert "secret" in error.what or name == "storage"
        refused(f"{tmp_path / name}.h5::x", "not followed")


@pytest.mark.usefixtures("tried")
def test_own_files_that_link_outwards_are_refused(tmp_path):
    hdf5.write(tmp_path / "secret.h5", {"test": Split(BIG_X, BIG_Y)})
    hdf5.write(tmp_path / "x.h5", {"test": Split(BIG_X, BIG_Y)})
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["test/embeddings"]
        file["test/embeddings"] = h5py.ExternalLink("secret.h5", "test/embeddings")
    refused(tmp_path / "x.h5", "not followed")


@pytest.mark.usefixtures("tried")
def test_a_virtual_data_set_inside_the_file_is_read(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["parts/a"] = BIG_X
        layout = h5py.VirtualLayout(BIG_X.shape, "f4")
        layout[:] = h5py.VirtualSource(".", "parts/a", BIG_X.shape)
        file.create_virtual_dataset("all", layout)
    np.testing.assert_array_equal(load(f"{tmp_path / 'x.h5'}::all").splits["test"].vectors, BIG_X)


def virtual(path, parts, shape=BIG_X.shape):
    """A file with the data set `a` and a virtual one, `x`, of (rows, source, its shape)."""
    with h5py.File(path, "w") as file:
        file["a"] = BIG_X
        layout = h5py.VirtualLayout(shape, "f4")
        for rows, source, size in parts:
            layout[rows] = h5py.VirtualSource(".", source, size)
        file.create_virtual_dataset("x", layout)
    return path


def test_a_virtual_data_set_of_parts_is_put_together(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a", data=BIG_X[:100], chunks=(7, 16), compression="gzip")
        file["b"] = BIG_X
        layout = h5py.VirtualLayout(BIG_X.shape, "f4")
        layout[:100] = h5py.VirtualSource(".", "a", (100, 16))
        layout[100:] = h5py.VirtualSource(".", "/b", BIG_X.shape)[100:]
        file.create_virtual_dataset("x", layout)
    np.testing.assert_array_equal(only(load(f"{tmp_path / 'x.h5'}::x")).vectors, BIG_X)


ALL, FIRST, REST = slice(None), slice(0, 300), slice(300, None)


@pytest.mark.parametrize(
    ("parts", "shape", "match"),
    [
        ([(ALL, "x", BIG_X.shape)], BIG_X.shape, "virtual itself"),
        ([(ALL, "gone", BIG_X.shape)], BIG_X.shape, "missing"),
        ([(FIRST, "a", BIG_X.shape)], (600, 16), "belong to no part"),
        ([(FIRST, "a", BIG_X.shape), (REST, "gone", BIG_X.shape)], (600, 16), "missing"),
        ([(slice(0, 600), "a", (600, 16))], (600, 16), "larger|another shape"),
        ([(slice(0, 600, 2), "a", BIG_X.shape)], (600, 16), "not a block"),
        ([(FIRST, "a", BIG_X.shape), (FIRST, "a", BIG_X.shape)], (600, 16), "overlaps another"),
    ],
)
def test_a_virtual_data_set_that_is_not_whole_is_refused(tmp_path, parts, shape, match):
    with pytest.raises(DmlError, match=match):
        load(f"{virtual(tmp_path / 'x.h5', parts, shape)}::x")


def test_a_virtual_data_set_of_text_is_refused(tmp_path):
    """HDF5 would have to convert it; only what NumPy can put together is."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["words"] = BIG_X, np.array([b"a", b"b"] * 150)
        layout = h5py.VirtualLayout((300,), "S1")
        layout[:] = h5py.VirtualSource(".", "words", (300,))
        file.create_virtual_dataset("labels", layout)
    with pytest.raises(DmlError, match="not made of plain numbers"):
        load(f"{tmp_path / 'x.h5'}::x,labels")


def test_virtual_data_sets_of_each_other_are_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, other in ("xy", "yx"):
            layout = h5py.VirtualLayout(BIG_X.shape, "f4")
            layout[:] = h5py.VirtualSource(".", other, BIG_X.shape)
            file.create_virtual_dataset(name, layout)
    with pytest.raises(DmlError, match="virtual itself"):
        load(f"{tmp_path / 'x.h5'}::x")


def test_a_virtual_data_set_of_numbered_parts_without_end_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        file["a0"] = BIG_X
        space = h5py.h5s.create_simple((0, 16), (h5py.h5s.UNLIMITED, 16))
        endless = {"count": (h5py.h5s.UNLIMITED, 1), "stride": (300, 1), "block": BIG_X.shape}
        space.select_hyperslab((0, 0), **endless)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_virtual(space, b".", b"a%b", h5py.h5s.create_simple(BIG_X.shape))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_FLOAT, space, plist)
    with pytest.raises(DmlError, match="unlimited size"):
        load(f"{tmp_path / 'x.h5'}::x")
