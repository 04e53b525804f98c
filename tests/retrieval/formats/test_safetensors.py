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


@pytest.mark.parametrize("second", [[32, 64], [0, 64], [16, 32]])
def test_tensors_that_share_bytes_are_damage(tmp_path, second):
    empty = {"dtype": "F32", "shape": [0, 4], "data_offsets": [24, 24]}
    header = {"x": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}, "empty": empty}
    safetensors_file(tmp_path / "x.safetensors", header)
    assert len(load(f"{tmp_path}/x.safetensors::x").splits["test"].vectors) == 4
    shape = [(second[1] - second[0]) // 8]
    header["y"] = {"dtype": "I64", "shape": shape, "data_offsets": second}
    safetensors_file(tmp_path / "x.safetensors", header)
    refused(tmp_path / "x.safetensors", "share bytes")


def test_safetensors_with_a_false_header(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    safetensors_file(tmp_path / "b.safetensors", b"[" * 100_000)
    safetensors_file(tmp_path / "c.safetensors", b"[]")
    safetensors_file(tmp_path / "d.safetensors", b"\xff\xfe")
    safetensors_file(tmp_path / "e.safetensors", {"x": 3})
    for name in "abcde":
        refused(tmp_path / f"{name}.safetensors", f"{name}.safetensors")
