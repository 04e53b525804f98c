"""Damage to files, by the bytes and by what a format means. Everything comes from one generator."""

from __future__ import annotations

import gzip
import io
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence

NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 1000, 4095, 4096),
    *(32_767, 32_768, 65_535, 65_536, 100_000, 1 << 20, (1 << 24) - 1, 1 << 24, 10**7),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 10**12, (1 << 53) + 1),
    *((1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1),
)
WORDS = (
    *("", "0", "-0", "-1", "1", "1.5", "1e999", "-1e999", "1e-400", "nan", "inf", "-inf", "1_0"),
    *("0x10", "1,5", "NaN", "null", "true", "None", "9" * 30, "9" * 400, "18446744073709551615"),
    *("-9223372036854775809", "9007199254740993", "a", "a\0", "\0", "é", "\u2028", "\U0001f600"),
    *("\ufeff", "\x1b[31m", "'", '"', '""', "[", "]", "{", "}", "[]", "{}", ",", ";", "\t", "\r"),
    *("\n", "\r\n", " ", "#", "=", "::", "../x", "/", "\\u0000", "\\ud800", "label", "embeddings"),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
Mutation = Callable[[bytearray, random.Random, Sequence[bytes]], bytes | bytearray]


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """One to a few damages by the bytes."""
    found = bytearray(data)
    while True:
        found = bytearray(rng.choice(BINARY)(found, rng, others))
        if rng.random() < 0.5 or not found:
            return bytes(found)


def _span(data: bytearray, rng: random.Random) -> tuple[int, int]:
    """Short stretches are likelier than long ones, both ends of the file likelier than its inside:
    headers and footers are there.
    """
    size = len(data)
    length = min(size, rng.choice((1, 2, 4, 8, 16, 64, 256, 1024, max(1, size // 4))))
    last = max(0, size - length)
    edge = min(last, 512)
    at = rng.choice((rng.randint(0, last), rng.randint(0, edge), last - rng.randint(0, edge)))
    return at, at + length


def _flip(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        at, _ = _span(data, rng)
        if data:
            data[at] ^= 1 << rng.randrange(8)
    return data


def _byte(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    at, _ = _span(data, rng)
    if data:
        data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return data


def _integer(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    width = rng.choice((1, 2, 4, 4, 8, 8))
    at, _ = _span(data, rng)
    if rng.random() < 0.5:
        at -= at % width  # fields are aligned as a rule
    value = rng.choice(NUMBERS) % (1 << 8 * width)
    data[at : at + width] = value.to_bytes(width, rng.choice(("little", "little", "big")))
    return data


def _size(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    """A field that looks like a size or an offset in this file becomes another number."""
    width = rng.choice((2, 4, 4, 8, 8))
    places = []
    for at in range(0, min(len(data), 1 << 14) - width, 1 if len(data) < 2048 else 2):
        value = int.from_bytes(data[at : at + width], "little")
        if 2 <= value <= len(data):
            places.append((at, value))
    if not places:
        return data
    at, value = rng.choice(places)
    changed = rng.choice((value + 1, value - 1, 2 * value, value // 2, 0, rng.choice(NUMBERS)))
    data[at : at + width] = (changed % (1 << 8 * width)).to_bytes(width, "little")
    return data


def _truncate(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    return data[: rng.choice((rng.randint(0, len(data)), max(0, len(data) - rng.randint(1, 64))))]


def _delete(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    a, b = _span(data, rng)
    del data[a:b]
    return data


def _repeat(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    a, b = _span(data, rng)
    data[a:a] = data[a:b] * rng.choice((1, 1, 2, 16))
    return data


def _swap(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    (a, b), (c, d) = _span(data, rng), _span(data, rng)
    data[a:b], data[c:d] = data[c:d], data[a:b]
    return data


def _insert(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    at, _ = _span(data, rng)
    fresh = rng.choice((rng.randbytes(rng.randint(1, 64)), bytes(rng.choice((1, 8, 4096)))))
    data[at:at] = fresh
    return data


def _fill(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytearray:
    a, b = _span(data, rng)
    data[a:b] = rng.choice((b"\0", b"\xff", b"\x80")) * (b - a)
    return data


def _splice(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """The head of one file and the tail of another."""
    other = rng.choice(others) if others else bytes(data)
    a, b = rng.randint(0, len(data)), rng.randint(0, len(other))
    if rng.random() < 0.5:
        a = b = min(a, len(other))
    return bytes(data[:a]) + other[b:]


BINARY: tuple[Mutation, ...] = (
    *(_flip, _flip, _byte, _integer, _integer, _size, _size),
    *(_truncate, _delete, _repeat, _swap, _insert, _fill, _splice),
)


def mutate_text(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Numbers, words and lines of a text; now and then its bytes, its encoding or its size."""
    text = data.decode("utf-8", "surrogateescape")
    for _ in range(rng.choice((1, 1, 2, 4))):
        text = rng.choice(TEXT)(text, rng)
    found = text.encode("utf-8", "surrogateescape" if rng.random() < 0.9 else "replace")
    way = rng.random()
    if way < 0.15:
        return mutate(found, rng, others)
    if way < 0.2:
        code = rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig"))
        return text.encode(code, "replace")
    return found


def _number(text: str, rng: random.Random) -> str:
    found = list(NUMBER.finditer(text[:20_000]))
    if not found:
        return text
    a, b = rng.choice(found).span()
    return text[:a] + rng.choice((rng.choice(WORDS), str(rng.choice(NUMBERS)))) + text[b:]


def _word(text: str, rng: random.Random) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(WORDS) + text[at + rng.choice((0, 0, 1, 4)) :]


def _line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    at = rng.randrange(len(lines))
    way = rng.randrange(5)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines[at:at] = [lines[rng.randrange(len(lines))]] * rng.choice((1, 1, 100))
    elif way == 2:
        lines[at] = lines[at].replace(rng.choice(",; \t=:"), rng.choice(",; \t=:|"))
    elif way == 3:
        lines[at] = lines[at].rstrip("\r\n") + rng.choice(("", "\r", "\r\n", "\n\n", "\0\n"))
    else:
        lines[at] = lines[at].rstrip("\n") * rng.choice((2, 2, 50)) + "\n"
    return "".join(lines)


def _cut(text: str, rng: random.Random) -> str:
    return text[: rng.randint(0, len(text))]


def _large(text: str, rng: random.Random) -> str:
    """Deep, long or wide: what a parser that recurses or pads stumbles over."""
    at, many = rng.randint(0, len(text)), rng.choice((10, 1000, 20_000))
    fresh = rng.choice(("[", "{", '{"a":', '"', "a.", "[[a]]\n", "x", "9", ",", "\n", " ", "\\"))
    return text[:at] + fresh * many + text[at:]


def _everywhere(text: str, rng: random.Random) -> str:
    a, b = rng.choice(',.;\n\t" []:=-0'), rng.choice((*',.;\n\t" []:=-0', "\r\n", "\r", ""))
    return text.replace(a, b)


TEXT = (_number, _number, _number, _word, _word, _line, _line, _cut, _large, _everywhere)


# Formats whose sums and lengths are put right again, so that the damage gets past the first check.


def mutate_zip(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A member is damaged and packed again with the right checksum."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [(info.filename, archive.read(info)) for info in archive.infolist()]
    sizes = [1 + len(content) // 256 for _, content in parts]
    at = rng.choice((rng.randrange(len(parts)), rng.choices(range(len(parts)), sizes)[0]))
    pickles = [n for n, (name, _) in enumerate(parts) if name.endswith(".pkl")]
    if pickles and rng.random() < 0.6:
        at = pickles[0]
    name, content = parts[at]
    way = rng.random()
    if way < 0.8:
        change = mutate_npy if content.startswith(b"\x93NUMPY") else mutate
        parts[at] = (name, change(content, rng, [c for _, c in parts]))
    elif way < 0.9:
        parts[at] = (rng.choice(("", "../x", "a" * 300, "é", name + "\n", name[:-1])), content)
    else:
        parts.append((name, mutate(content, rng)))
    return packed(parts, zipfile.ZIP_DEFLATED if rng.random() < 0.3 else zipfile.ZIP_STORED)


def mutate_gzip(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """What is packed is damaged and packed again; now and then it becomes a bomb."""
    inner = gzip.decompress(data)
    text = b"\0" not in inner
    if rng.random() < 0.1:
        inner += (inner[-40:] or b"0") * rng.choice((1000, 100_000))
    else:
        inner = (mutate_text if text else rng.choice((mutate, mutate_npy)))(inner, rng)
    return gzip.compress(inner, 1, mtime=0)


def packed(parts: Sequence[tuple[str, bytes]], how: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive whose bytes do not depend on the clock."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, content in parts:
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = how
            if name in archive.NameToInfo:
                archive.NameToInfo.pop(name)  # twice the same name, without a warning
            archive.writestr(info, content)
    return out.getvalue()


def mutate_npy(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """The header's text is changed and its length put right."""
    length = int.from_bytes(data[8:10], "little")
    head, rest = data[10 : 10 + length].decode("latin-1"), data[10 + length :]
    kinds = ("<f2", "<f4", ">f8", "<f16", "|O", "|S0", "<U0", "|S9", "<c8", "|b1", "<M8[ns]", "<V4")
    if rng.random() < 0.4:
        head = re.sub(r"'descr': '[^']*'", f"'descr': '{rng.choice(kinds)}'", head)
    else:
        head = rng.choice((_number, _number, _word, _cut))(head, rng)
    raw = head.encode("utf-8", "replace")[:65_000]
    return data[:8] + struct.pack("<H", len(raw)) + raw + rest


def mutate_safetensors(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    length = int.from_bytes(data[:8], "little")
    head = mutate_text(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(head)) + head + data[8 + length :]


def mutate_png(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A chunk is damaged and its checksum put right."""
    out, at = bytearray(data[:8]), 8
    chunks = []
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    hit = rng.randrange(len(chunks))
    for number, (kind, body) in enumerate(chunks):
        if number == hit:
            body = mutate(body, rng) if body else rng.randbytes(8)
        out += (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )
    return bytes(out)


def mutate_footer(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Parquet keeps what matters at its end, before its length and magic bytes."""
    length = min(int.from_bytes(data[-8:-4], "little"), len(data) - 8)
    start = len(data) - 8 - length
    footer = mutate(data[start:-8], rng)
    return data[:start] + footer + struct.pack("<I", len(footer)) + data[-4:]
