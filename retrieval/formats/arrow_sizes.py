"""Add up what the batches of an Arrow file claim to hold, from their metadata alone.

pyarrow inflates a compressed buffer to whatever length it claims, and has no way to ask first. The
metadata are flatbuffers: tables of offsets, of which only the few that matter are followed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

DICTIONARY, BATCH = 2, 3  # kinds of messages
BLOCKS = 2, 3  # fields of the footer of a file: those with dictionaries, and with rows
BLOCK = struct.Struct("<qi4xq")  # where a message begins, and the lengths of its two parts
END, MAGIC = struct.Struct("<i6s"), b"ARROW1"  # the length of the footer, and the last bytes


def sizes(data: pa.Buffer, is_file: bool) -> tuple[int, int, bool]:
    """Rows, bytes once inflated, and whether anything is compressed, of a file or a stream."""
    rows = total = 0
    compressed = False
    for message in _in_file(data) if is_file else pa.ipc.MessageReader.open_stream(data):
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


def _in_file(data: pa.Buffer) -> Iterator[pa.Message]:
    """The messages that the footer of a file lists, which are those that Arrow reads.

    What stands before the footer should be a stream of the same messages, and is none in files of
    Polars: their first message lacks its length.
    """
    end = data.size - END.size
    length, magic = END.unpack_from(data, end) if end > 0 else (0, b"")
    if magic != MAGIC or not 0 < length <= end:
        raise ValueError("its footer is missing, so it was probably cut short")
    footer = memoryview(data)[end - length : end]
    (root,) = struct.unpack_from("<I", footer, 0)
    for number in BLOCKS:
        for start, head, body in _structs(footer, root, number, BLOCK):
            yield pa.ipc.read_message(data.slice(start, head + body))


def _lengths(meta: memoryview, batch: int, body: memoryview, compressed: bool) -> list[int]:
    """The length of every buffer; a compressed one begins with its own, or -1 where it is not."""
    found = []
    for offset, length in _structs(meta, batch, 2, struct.Struct("<qq")):
        if compressed and length:
            (claimed,) = struct.unpack_from("<q", body, offset)
            length = length if claimed == -1 else claimed
        if length < 0:
            raise ValueError(f"a buffer of {length} bytes")
        found.append(length)
    return found


def _structs(
    meta: memoryview, table: int, number: int, layout: struct.Struct
) -> Iterator[tuple[int, ...]]:
    """The values of each struct in a vector of structs; none if it is left out."""
    place = _field(meta, table, number)
    if place is None:
        return iter(())
    (at,) = struct.unpack_from("<I", meta, place)
    (count,) = struct.unpack_from("<I", meta, place + at)
    return layout.iter_unpack(meta[place + at + 4 :][: layout.size * count])


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
