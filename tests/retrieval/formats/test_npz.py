"""Files of numpy.savez, also bombs and damaged ones."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.formats import arrays
from retrieval.loading.load import load
from tests.retrieval.formats.samples import BIG_X, BIG_Y, ROUND, items, npy_header, refused, same


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


def test_a_zip_bomb_is_refused(tmp_path):
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


def test_a_zip_that_lies_about_its_sizes_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.savez(buffer, embeddings=BIG_X)
    data = bytearray(buffer.getvalue())
    at = data.rindex(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 31, 1 << 31)
    (tmp_path / "x.npz").write_bytes(data)
    refused(tmp_path / "x.npz", "claims|cannot be read")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_wrong_checksum_in_an_npz_is_an_error(tmp_path, save):
    save(tmp_path / "x.npz", embeddings=BIG_X, labels=BIG_Y)
    load(tmp_path / "x.npz")
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[2000] ^= 1  # inside the vectors
    (tmp_path / "x.npz").write_bytes(data)
    refused(tmp_path / "x.npz", "damaged|Bad CRC|Error -3")


def test_an_npz_member_that_goes_on_after_its_end_is_an_error(tmp_path):
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", kind) as file:
            file.writestr("embeddings.npy", npy_header("(4, 4)") + bytes(100))
        refused(tmp_path / "x.npz", "100 bytes for 64")
