"""FAISS indexes: flat ones are read, others are named with a line that converts them."""

import struct

import faiss
import numpy as np
import pytest

from retrieval.loading.load import load
from tests.retrieval.formats.samples import follow, refused

X = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
Y = np.arange(30) // 3


@pytest.mark.parametrize("suffix", ["faiss", "index", "bin"])
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L1])
def test_a_flat_faiss_index_is_read(tmp_path, metric, suffix):
    index = faiss.IndexFlat(4, metric)
    index.add(X)
    faiss.write_index(index, str(tmp_path / f"x.{suffix}"))
    np.save(tmp_path / "y.npy", Y)
    found = load(tmp_path / f"x.{suffix}", labels=tmp_path / "y.npy")
    assert found.format == "faiss"
    np.testing.assert_array_equal(found.splits["test"].vectors, X, strict=True)
    np.testing.assert_array_equal(found.splits["test"].labels, Y)


@pytest.mark.parametrize("kind", [faiss.IndexIDMap, faiss.IndexIDMap2])
def test_ids_of_a_faiss_index_are_labels_only_when_asked_for(tmp_path, kind):
    index = kind(faiss.IndexFlatIP(4))
    index.add_with_ids(X, Y)
    path = tmp_path / "x.faiss"
    faiss.write_index(index, str(path))
    found = load(path)
    assert found.splits["test"].labels is None
    assert "::vectors,ids" in found.notes[0]
    np.testing.assert_array_equal(found.splits["test"].vectors, X)
    np.testing.assert_array_equal(load(f"{path}::vectors,ids").splits["test"].labels, Y)
    np.testing.assert_array_equal(load(path, labels=path).splits["test"].labels, Y)


def test_every_cut_of_a_faiss_index_is_an_error(tmp_path):
    index = faiss.IndexIDMap(faiss.IndexFlatL2(4))
    index.add_with_ids(X, Y)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    data = (tmp_path / "x.faiss").read_bytes()
    for length in range(1, len(data), 7):
        (tmp_path / "y.faiss").write_bytes(data[:length])
        refused(tmp_path / "y.faiss", "FAISS index|claims")


@pytest.mark.parametrize("dim", [-1, 0, 5, 2**31 - 1])
@pytest.mark.parametrize("count", [-1, 0, 31, 2**62])
def test_a_faiss_header_that_lies_is_an_error(tmp_path, dim, count):
    header = b"IxF2" + struct.pack("<iqqq?iQ", dim, count, 0, 0, True, 1, abs(dim * count) % 2**64)
    (tmp_path / "x.faiss").write_bytes(header + X.tobytes())
    refused(tmp_path / "x.faiss", "damaged|claims")


def test_a_file_that_is_no_faiss_index_is_told(tmp_path):
    (tmp_path / "x.index").write_bytes(b"\x00\x00\x00\x00 something else")
    refused(tmp_path / "x.index", "not a FAISS index")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("HNSW8", "IndexHNSWFlat"),
        ("IVF4,Flat", "IndexIVFFlat"),
        ("SQ8", "IndexScalarQuantizer"),
        ("IDMap,HNSW8", "IndexHNSWFlat"),
        ("IDMap2,IVF4,Flat", "IndexIVFFlat"),
        ("L2norm,Flat", "IndexPreTransform"),
    ],
)
def test_other_faiss_indexes_are_named_and_the_line_converts_them(tmp_path, kind, name):
    index = faiss.index_factory(4, kind)
    index.train(X)
    index.add_with_ids(X, Y) if kind.startswith("IDMap") else index.add(X)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    error = refused(tmp_path / "x.faiss", name)
    assert "reconstruct_n" in error.fix
    if "IVF" not in kind or "IDMap" not in kind:
        follow(error, tmp_path)
        assert load(tmp_path / "x.npy").splits["test"].vectors.shape == X.shape


def test_binary_faiss_indexes_become_bits(tmp_path):
    index, codes = faiss.IndexBinaryFlat(16), (X[:, :2] * 40).astype(np.uint8)
    index.add(codes)
    faiss.write_index_binary(index, str(tmp_path / "x.index"))
    follow(refused(tmp_path / "x.index", "IndexBinaryFlat"), tmp_path)
    found = load(tmp_path / "x.npy").splits["test"].vectors
    np.testing.assert_array_equal(found, np.unpackbits(codes, axis=1))
