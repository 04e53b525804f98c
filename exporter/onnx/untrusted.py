"""Read an ONNX file that may be malicious.

Nothing in it is executed, no file outside its folder is opened, and a file that is not a model is
refused before it costs memory or time.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, TypeVar

from retrieval.errors import DmlError
from retrieval.files import sha256
from retrieval.formats.refused import missing
from retrieval.number_format import size
from retrieval.run_files import BEST

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message
    from onnx import ModelProto

    T = TypeVar("T", bound=Message)

MAX_BYTES = 2**31 - 1  # protobuf's own limit
MAX_PARTS = 500_000
"""Values and messages in a file. Networks have tens of thousands; two bytes of a file can become a
hundred bytes of memory, so that a file of empty messages would fill it."""
MAX_BATCH, MAX_INPUT = 4096, 1 << 30
"""Limits of a fixed batch: images, and bytes as float32. Smaller batches are padded to its size."""
_EXPECTED = "An ONNX file was expected."
_ANOTHER = "Use a file made by `dmltool export` or another exporter."


def read_bytes(path: Path) -> bytes:
    """Read a regular file that is small enough to be a model."""
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            inside = sorted(path.glob("*.onnx"))
            fix = f"Name the file: {inside[0]}" if inside else "Name an .onnx file."
            if not inside and (path / BEST).exists():
                fix = f"It is a run; export it first: dmltool export {shlex.quote(str(path))}"
            raise DmlError(f"{path} is a folder.", _EXPECTED, fix)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise DmlError(f"{path} is not a regular file.", _EXPECTED, _ANOTHER)
        if not found.st_size:
            raise DmlError(f"{path} is empty.", _EXPECTED, _ANOTHER)
        if found.st_size > MAX_BYTES:
            raise DmlError(
                f"{path} has {found.st_size:,} bytes.",
                "An ONNX file has at most 2 GB; larger weights are in a file beside it.",
                "Export it with external data.",
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise missing(path) from error
    except OSError as error:
        raise DmlError(
            f"{path} cannot be read.", f"{error.strerror or error}.", "Name an .onnx file."
        ) from error


def parse(data: bytes, path: Path) -> ModelProto:
    """Parse a model; the path is for error messages."""
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    try:
        count_parts(data)
        model = ModelProto.FromString(data)
        parts = {
            "a version": model.ir_version,
            "a graph": len(model.graph.node),
            "its operators' versions": len(model.opset_import),
        }
        if missing := [name for name, value in parts.items() if value < 1]:
            raise _Told(f"It lacks {', '.join(missing)}.")
        return model
    except (DecodeError, ValueError) as error:
        raise DmlError(f"{path} is not a whole ONNX file.", _guess(data, error), _ANOTHER) from None


def _guess(data: bytes, error: Exception) -> str:
    for magic, name in (
        (b"PK\x03\x04", "a zip archive, such as a checkpoint of torch"),
        (b"\x89HDF", "an HDF5 file"),
        (b"\x89PNG", "a picture"),
        (b"\xff\xd8\xff", "a picture"),
        (b"version https://git-lfs", "a pointer of Git LFS instead of the file: git lfs pull"),
        (b"<", "a web page"),
    ):
        if data.startswith(magic):
            return f"It is {name}."
    if isinstance(error, _Told):
        return str(error)
    if data[:1000].isascii() and data[:1000].decode("ascii").isprintable():
        return "It is a text."
    return "It is cut off, damaged, or of another kind."


# Files that would fill the memory


class _Told(ValueError):
    """An error whose text says what is wrong with the file."""


def count_parts(data: bytes) -> int:
    """Count the values and messages that parsing would create, without creating any.

    Raises ValueError if there are more than MAX_PARTS, if the data is broken, or if a text is not
    UTF-8, which protobuf would return as bytes.
    """
    from onnx import ModelProto

    seen, stack = 0, [(0, len(data), ModelProto.DESCRIPTOR)]
    while stack:
        at, end, kind = stack.pop()
        inner = _inner(kind)
        while at < end:
            seen += 1
            if seen > MAX_PARTS:
                raise _Told(
                    f"It has more than {MAX_PARTS:,} parts; networks have some ten thousand."
                )
            key, at = _varint(data, at, end)
            wire = key & 7
            if wire == 2:
                length, at = _varint(data, at, end)
                if key >> 3 in inner:
                    message = inner[key >> 3]
                    if message is not None:
                        stack.append((at, at + length, message))
                    else:
                        str(data[at : at + length], "utf-8")
                at += length
            elif wire == 0:
                _, at = _varint(data, at, end)
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:  # groups are no part of ONNX
                raise ValueError(f"wire type {wire}")
            if at > end:
                raise ValueError("cut off")
    return seen


@cache
def _inner(kind: Descriptor) -> dict[int, Descriptor | None]:
    """The kind of each field that holds messages, by its number; None: it holds texts."""
    return {
        f.number: f.message_type
        for f in kind.fields
        if f.message_type is not None or f.type == f.TYPE_STRING
    }


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("cut off")


# What a model may refer to


def external_files(model: ModelProto, path: Path) -> list[Path]:
    """The files beside a model that hold its weights; a DmlError if one is outside its folder."""
    from onnx import TensorProto

    folder = Path(os.path.abspath(path)).parent
    found: dict[str, Path] = {}
    for tensor in messages(model, TensorProto):
        if tensor.data_location != tensor.EXTERNAL and not tensor.external_data:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in found:
            found[location] = _inside(location, folder, path)
        _check_span(entries, found[location], path)
    return [found[name] for name in sorted(found)]


def _inside(location: str, folder: Path, path: Path) -> Path:
    shown = repr(location[:200])
    parts = PureWindowsPath(location)  # takes / as well
    outside = not location or "\0" in location or parts.anchor or ".." in parts.parts
    if not outside:  # a link may lead elsewhere
        outside = not (folder / location).resolve().is_relative_to(folder.resolve())
    if outside:
        raise DmlError(
            f"{path} refers to weights outside its folder: {shown}.",
            "A model may only use files beside it, and no links that lead elsewhere.",
            "If you trust it, put that file itself beside the model and correct the name in it.",
        )
    if not (folder / location).is_file():
        raise DmlError(
            f"{path} lacks the file of its weights, {shown}.",
            f"It is not in {folder}.",
            "Copy it there; both files belong together.",
        )
    return folder / location


def _check_span(entries: dict[str, str], file: Path, path: Path) -> None:
    size = file.stat().st_size
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or 0)
    except ValueError:
        offset, length = -1, 0
    if offset < 0 or length < 0 or offset + length > size:
        raise DmlError(
            f"{path} and {file.name} do not belong together.",
            f"Weights are said to lie beyond the {size:,} bytes of {file.name}; it may be cut off.",
            "Copy both files again.",
        )


def check_operators(model: ModelProto, path: Path) -> None:
    """Refuse EPContext nodes, which make a provider load compiled code from any file."""
    from onnx import NodeProto

    if any(node.op_type == "EPContext" for node in messages(model, NodeProto)):
        raise DmlError(
            f"{path} holds code that was compiled for one device (EPContext).",
            "Such code is not run from a file.",
            "Use the plain ONNX model that it was made from.",
        )


def check_batch(path: Path, batch: int | None, pixels: int) -> None:
    """Raise a DmlError if a fixed batch of images of so many pixels does not fit into memory."""
    if batch is not None and (batch > MAX_BATCH or batch * pixels * 3 * 4 > MAX_INPUT):
        raise DmlError(
            f"{path} takes batches of {batch:,} images and no others.",
            f"{size(batch * pixels * 3 * 4)} would be needed for each; the limits are "
            f"{MAX_BATCH:,} images and {size(MAX_INPUT)}.",
            "Export it with a dynamic batch.",
        )


def digest(data: bytes, beside: list[Path]) -> str:
    """SHA-256 of a model: of its bytes and of the files with its weights."""
    found = hashlib.sha256(data)
    for path in beside:
        found.update(path.name.encode() + b"\0" + bytes.fromhex(sha256(path)))
    return found.hexdigest()


def messages(model: ModelProto, kind: type[T]) -> Iterator[T]:
    """All parts of a model of one type, wherever they are: in nodes, functions, training graphs."""
    from google.protobuf.message import Message
    from onnx import TensorProto

    stack: list[Message] = [model]
    while stack:
        message = stack.pop()
        if isinstance(message, kind):
            yield message
        if isinstance(message, TensorProto):
            continue  # holds no other parts, and listing its fields would copy its numbers
        for field, value in message.ListFields():
            if field.message_type is not None:
                stack += [value] if isinstance(value, Message) else value
