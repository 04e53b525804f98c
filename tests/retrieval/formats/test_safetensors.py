"""Files of safetensors, also with false headers."""

import json
import struct

import pytest
import safetensors.numpy
from hypothesis import given

from retrieval.loading.load import load
from tests.retrieval.formats.samples import HUGE, ROUND, items, refused, same


@ROUND
@given(item=items(["float16", "float32", "float64", "int8", "uint8"], text=False))
def test_safetensors_round_trip(tmp_path, item):
    x, y = item
    safetensors.numpy.save_file({"embeddings": x, "labels": y}, tmp_path / "x.safetensors")
    same(load(tmp_path / "x.safetensors"), x, y)


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
def test_safetensors_with_false_offsets(tmp_path, shape, offsets):
    info = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    safetensors_file(tmp_path / "x.safetensors", {"x": info})
    refused(tmp_path / "x.safetensors", "x.safetensors")


def test_safetensors_with_a_false_header(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    safetensors_file(tmp_path / "b.safetensors", b"[" * 100_000)
    safetensors_file(tmp_path / "c.safetensors", b"[]")
    safetensors_file(tmp_path / "d.safetensors", b"\xff\xfe")
    safetensors_file(tmp_path / "e.safetensors", {"x": 3})
    for name in "abcde":
        refused(tmp_path / f"{name}.safetensors", f"{name}.safetensors")
