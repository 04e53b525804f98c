"""Compressed Arrow files that claim too much: their sizes are added up before they are read."""

import struct

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.retrieval.formats.samples import BIG_X, BIG_Y, ROWS, arrow_table, measure

pytestmark = pytest.mark.usefixtures("tried")


def test_arrow_files_that_claim_more_than_memory_are_called_damaged(tmp_path, monkeypatch):
    table = pa.table({"e": BIG_X.tolist(), "label": BIG_Y})
    pa.feather.write_feather(table, str(tmp_path / "x.feather"), compression="zstd")
    data = (tmp_path / "x.feather").read_bytes()
    for trial in "01":
        monkeypatch.setenv("DMLTOOL_TRIAL", trial)
        for size in (BIG_X.size * 8, BIG_Y.nbytes):  # the claim at the start of a compressed buffer
            at = data.index(struct.pack("<q", size) + b"\x28\xb5\x2f\xfd")
            for claim in (1 << 45, 1 << 62, -7):
                broken = bytearray(data)
                struct.pack_into("<q", broken, at, claim)
                (tmp_path / "x.feather").write_bytes(broken)
                with pytest.raises(DmlError, match=r"claims|cannot be read"):
                    load(tmp_path / "x.feather")


@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
def test_the_messages_of_a_file_are_those_that_its_footer_lists(tmp_path, compression):
    """Polars writes the first message without its length, so that no stream begins there."""
    path = tmp_path / "x.arrow"
    table = arrow_table(pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode())
    pa.feather.write_feather(table, str(path), compression, chunksize=100)
    before = load(path).splits["test"]
    data = bytearray(path.read_bytes())
    data[8:16] = b"\x04\0\0\0\xf2\xff\xff\xff"
    path.write_bytes(data)
    after = load(path).splits["test"]
    np.testing.assert_array_equal(before.vectors, after.vectors)
    np.testing.assert_array_equal(before.labels, after.labels)


@pytest.mark.parametrize("left", [5, 9, 40, -3])
def test_a_file_that_was_cut_short_is_told_as_such(tmp_path, left):
    path = tmp_path / "x.arrow"
    pa.feather.write_feather(arrow_table(pa.array([0, 1] * (ROWS // 2))), str(path))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DmlError) as caught:
        load(path)
    assert "footer is missing, so it was probably cut short" in caught.value.why


def test_compressed_arrow_files_that_claim_too_much(tmp_path):
    zeros = pa.array(np.zeros(80_000_000, np.float32))  # 320 MB
    big = pa.table({"f0": zeros, "f1": zeros})
    pa.feather.write_feather(arrow_table(["a"] * ROWS), str(tmp_path / "ok.feather"))
    for kind in ("zstd", "lz4"):
        name = str(tmp_path / f"{kind}.feather")
        pa.feather.write_feather(big, name, kind, chunksize=len(zeros))
    with pa.ipc.new_stream(
        tmp_path / "zstd.arrow", big.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as stream:
        stream.write_table(big)
    told = measure(*(tmp_path / n for n in ("ok.feather", "zstd.feather", "zstd.arrow")))
    assert all("claims 640,000,000 bytes" in text for text in told)
