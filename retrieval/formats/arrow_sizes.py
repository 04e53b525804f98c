"""Add up what the batches of an Arrow file claim to hold, from their metadata alone.

pyarrow inflates a compressed buffer to whatever length it claims, and has no way to ask first. The
metadata are flatbuffers: tables of offsets, of which only the few that matter are followed.
"""

from __future__ import annotations

import struct

import pyarrow as pa

SCHEMA, DICTIONARY, BATCH = 1, 2, 3


def sizes(data: pa.Buffer) -> tuple[int, int, bool]:
    """Rows, bytes once inflated, and whether anything is compressed, of a stream of messages."""
    rows = total = 0
    compressed = False
    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(data)):
        meta = memoryview(message.metadata)
        (root,) = struct.unpack_from("<I", meta, 0)
        kind = _number(meta, root, 1, "<B")
        if kind not in (DICTIONARY, BATCH):
            continue
        batch = _table(meta, root, 2)
        if kind == DICTIONARY:
            batch = _table(meta, batch, 1)
        else:
            rows += _number(meta, batch, 0, "<q")
        inflated = _field(meta, batch, 3) is not None
        compressed |= inflated
        total += sum(_lengths(meta, batch, memoryview(message.body), inflated))
    return rows, total, compressed


def _lengths(meta: memoryview, batch: int, body: memoryview, compressed: bool) -> list[int]:
    """The length of every buffer; a compressed one begins with its own, or -1 where it is not."""
    place = _field(meta, batch, 2)
    if place is None:
        return []
    (at,) = struct.unpack_from("<I", meta, place)
    (count,) = struct.unpack_from("<I", meta, place + at)
    found = []
    for offset, length in struct.iter_unpack("<qq", meta[place + at + 4 :][: 16 * count]):
        if compressed and length:
            (claimed,) = struct.unpack_from("<q", body, offset)
            length = length if claimed == -1 else claimed
        if length < 0:
            raise ValueError(f"a buffer of {length} bytes")
        found.append(length)
    return found


def _field(meta: memoryview, table: int, number: int) -> int | None:
    """Where a field of a table lies; None if it is left out."""
    (back,) = struct.unpack_from("<i", meta, table)
    layout = table - back
    (size,) = struct.unpack_from("<H", meta, layout)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", meta, layout + 4 + 2 * number)
    return table + offset if offset else None


def _number(meta: memoryview, table: int, number: int, format: str) -> int:
    place = _field(meta, table, number)
    return struct.unpack_from(format, meta, place)[0] if place is not None else 0


def _table(meta: memoryview, table: int, number: int) -> int:
    place = _field(meta, table, number)
    if place is None:
        raise ValueError("a message without content")
    return place + struct.unpack_from("<I", meta, place)[0]
