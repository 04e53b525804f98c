"""TEXMEX vectors."""

import struct

import numpy as np
import pytest
from hypothesis import given

from retrieval.loading.load import load
from tests.retrieval.formats.samples import ROUND, items, refused, same


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


@pytest.mark.parametrize("length", [0, -1, 2**31 - 1, 17])
def test_vecs_with_a_false_length(tmp_path, length):
    (tmp_path / "x.fvecs").write_bytes(struct.pack("<i", length) + b"\0" * 64)
    refused(tmp_path / "x.fvecs", "claims")


def test_vecs_with_rows_of_different_lengths(tmp_path):
    rows = np.array([[1, 5], [2, 5], [1, 5]], "<i4")
    rows.tofile(tmp_path / "x.fvecs")
    refused(tmp_path / "x.fvecs", "different lengths")
