"""Read `.parquet`, `.arrow`, `.feather`: one list column, or a column for each dimension."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from retrieval.embeddings import Wanted
from retrieval.errors import DmlError, damaged
from retrieval.formats import labels
from retrieval.formats.arrays import Range, ensure, refuse_bomb, refuse_rounded, reserve
from retrieval.formats.arrow_sizes import sizes
from retrieval.formats.columns import Choice, Column, Roles, Table

BATCH_ROWS = 1 << 14


@dataclass(frozen=True)
class Source:
    """An open file: its columns, how many rows it claims, and batches of chosen columns."""

    schema: Any
    rows: int
    batches: Callable[[list[str]], Iterator[Any]]  # names of columns -> record batches

    def columns(self) -> list[Column]:
        return [Column(n, field.name, _kind(field.type)) for n, field in enumerate(self.schema)]


def table(path: Path, wanted: Wanted) -> Table:
    with _damage(path):
        return as_table(path, _open(path))


def as_table(path: Path, source: Source) -> Table:
    def blocks(found: Roles) -> Iterator[tuple[np.ndarray | None, dict[str, Any]]]:
        names = [column.name for column in found.vectors]
        beside = {role: column.name for role, column in found.beside.items()}
        count, dim = 0, 0
        with _damage(path):
            for batch in source.batches([*names, *beside.values()]):
                kept = {role: _text_or_numbers(path, batch, name) for role, name in beside.items()}
                vectors = None
                if names and batch.num_rows:
                    vectors = _vectors(path, batch, names, found.is_list, count)
                    dim = dim or vectors.shape[1]
                    if vectors.shape[1] != dim:
                        raise _ragged(path, count, vectors.shape[1], dim)
                count += batch.num_rows
                yield vectors, kept
        if not count:
            raise DmlError(f"{path} has no rows.", "There is nothing to read.", "Write it again.")
        if count != source.rows:
            raise damaged(f"{path} claims {source.rows:,} rows and holds {count:,}.")

    def convert(role: str, parts: list) -> np.ndarray:
        array = np.concatenate(parts)
        return (labels.labels if role == "labels" else labels.strings)(array, str(path))

    names = _class_names(source.schema)
    return Table(source.columns(), lambda dim: source.rows, blocks, convert, names)


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """The names of classes by column, as Hugging Face's datasets notes them in a schema."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # anyone's file
        return {}
    # A feature is an object; of lists it may also be a list.
    named = {name: each.get("names") for name, each in features if isinstance(each, dict)}
    return {
        name: names
        for name, names in named.items()
        if isinstance(names, list) and all(isinstance(each, str) for each in names)
    }


def trial(path: Path, key: str | None, wanted: Wanted) -> None:
    """Read every column that is going to be read."""
    pa.set_memory_pool(pa.system_memory_pool())  # others reserve more than they use
    source = _open(path)
    found = Choice(source.columns(), path).roles(key, wanted)
    for _ in source.batches([c.name for c in (*found.vectors, *found.beside.values())]):
        pass


def _open(path: Path) -> Source:
    with path.open("rb") as file:
        start = file.read(4)
    return _open_parquet(path) if start == b"PAR1" else _open_ipc(path, start)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Report a claim of more bytes than there is memory for as damage to the file."""
    try:
        yield
    except pa.ArrowMemoryError as error:
        raise DmlError(
            f"{path} claims more data than memory can hold.",
            f"{error}.",
            "The file is probably damaged: copy or write it again.",
        ) from error


def _open_parquet(path: Path) -> Source:
    _fetch_footer(path)
    with pq.ParquetFile(path, memory_map=True) as first:
        schema, metadata = first.schema_arrow, first.metadata
    refuse_bomb(str(path), os.path.getsize(path), _values(metadata) * 4)
    # A text that many rows share stays one text.
    shared = [field.name for field in schema if _kind(field.type) in ("text", "bytes")]
    file = pq.ParquetFile(path, memory_map=True, metadata=metadata, read_dictionary=shared)

    def batches(names: list[str]) -> Iterator[Any]:
        ensure(path, _extents(metadata, names))
        return file.iter_batches(BATCH_ROWS, columns=names)

    return Source(schema, metadata.num_rows, batches)


def _fetch_footer(path: Path) -> None:
    """Download the metadata at the end, whose last eight bytes begin with their length."""
    size = os.path.getsize(path)
    with path.open("rb") as file:
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
    ensure(path, [(max(0, size - 8 - length), size)])


def _extents(metadata: Any, names: list[str]) -> Iterator[Range]:
    """Where the chunks of these columns are in the file."""
    first = metadata.row_group(0) if metadata.num_row_groups else None
    paths = [first.column(n).path_in_schema for n in range(first.num_columns)] if first else []
    inside = tuple(f"{name}." for name in names)
    chosen = [n for n, path in enumerate(paths) if path in names or path.startswith(inside)]
    for group in range(metadata.num_row_groups):
        for n in chosen:
            column = metadata.row_group(group).column(n)
            # Some writers leave the place of the dictionary at 0, or put a wrong size: Arrow
            # then reads up to 100 bytes more.
            start = min(
                column.dictionary_page_offset or column.data_page_offset, column.data_page_offset
            )
            yield start, start + column.total_compressed_size + 100


def _open_ipc(path: Path, start: bytes) -> Source:
    """Batches of an Arrow file or stream; only the requested columns are inflated."""
    ensure(path)
    source = pa.memory_map(str(path)).read_buffer()
    is_file = start == b"ARRO"  # Hugging Face's datasets writes streams under the same suffix
    rows, size, compressed = sizes(source, is_file)
    if compressed:
        refuse_bomb(str(path), os.path.getsize(path), size)
    opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
    schema = opened(source).schema

    def batches(names: list[str]) -> Iterator[Any]:
        wanted = [schema.names.index(name) for name in names]
        reader = opened(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))
        if is_file:
            found = (reader.get_batch(n) for n in range(reader.num_record_batches))
        for batch in found if is_file else reader:
            batch.validate(full=True)
            yield batch

    return Source(schema, rows, batches)


def _values(metadata: Any) -> int:
    """How many values all columns claim to hold: encodings can make them nearly free."""
    return sum(
        metadata.row_group(group).column(column).num_values
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )


def _kind(type: pa.DataType) -> str:
    t = pa.types
    if t.is_dictionary(type):
        return _kind(type.value_type)
    if _is_list(type):
        inside = _storage(type).value_type
        return "list" if t.is_integer(inside) or t.is_floating(inside) else "other"
    if t.is_integer(type) or t.is_boolean(type):
        return "integer"
    if t.is_floating(type):
        return "number"
    # Views are of Polars; pyarrow 15 has no functions for them.
    if t.is_string(type) or t.is_large_string(type) or str(type) == "string_view":
        return "text"
    binary = t.is_binary(type) or t.is_large_binary(type) or str(type) == "binary_view"
    return "bytes" if binary else "other"


def _is_list(type: pa.DataType) -> bool:
    t, type = pa.types, _storage(type)
    return t.is_list(type) or t.is_large_list(type) or t.is_fixed_size_list(type)


def _storage(type: pa.DataType) -> Any:
    """The type in which an extension type, such as a tensor of fixed shape, is stored."""
    return type.storage_type if isinstance(type, pa.BaseExtensionType) else type


def _vectors(path: Path, batch: Any, names: list[str], is_list: bool, at: int) -> np.ndarray:
    """(n, D), of the rows from `at` on."""
    if not is_list:
        return _wide(path, [batch.column(name) for name in names], names)
    column = batch.column(names[0])
    if column.null_count:
        row = at + column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise DmlError(
            f"{path}, row {row}: {names[0]} is null.",
            "Every item needs its vector.",
            "Fill in the value or remove the row.",
        )
    return _lists(path, column, at)


def _wide(path: Path, columns: list, names: list[str]) -> np.ndarray:
    arrays = [column.to_numpy(zero_copy_only=False) for column in columns]
    out = np.empty((len(arrays[0]), len(arrays)), np.result_type(*arrays))
    for n, array in enumerate(arrays):
        if out.dtype.kind == "f":
            whole = columns[n].drop_null().to_numpy(zero_copy_only=False)
            refuse_rounded(whole, f"{path}::{names[n]}")
        out[:, n] = array
    return out


def _lists(path: Path, column: pa.Array, at: int) -> np.ndarray:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_fixed_size_list(column.type):
        dim = column.type.list_size
    else:
        lengths = np.diff(column.offsets.to_numpy())
        dim = int(lengths[0])
        if (lengths != dim).any():
            row = int((lengths != dim).argmax())
            raise _ragged(path, at + row, int(lengths[row]), dim)
    values = column.flatten()
    if values.null_count or len(values) != dim * len(column) or not dim:
        raise DmlError(
            f"{path}: a vector holds nulls or is empty.",
            "Every item needs its vector.",
            "Fill in the values or remove the row.",
        )
    return values.to_numpy(zero_copy_only=False).reshape(len(column), dim)


def _ragged(path: Path, row: int, found: int, first: int) -> DmlError:
    return DmlError(
        f"{path}, row {row}: the vector has {found} numbers.",
        f"The first vector has {first}.",
        "Correct the row or remove it.",
    )


def _text_or_numbers(path: Path, batch: Any, name: str) -> np.ndarray:
    """(n,) numbers, or text as objects, of which rows with the same text share one."""
    column = batch.column(name)
    kind = _kind(column.type)
    if kind not in ("text", "bytes", "integer", "number"):
        raise DmlError(
            f"{path}::{name} has type {column.type}.",
            "Labels are integers or strings.",
            "Choose another column: --labels FILE::COLUMN",
        )
    if column.null_count:
        raise DmlError(
            f"{path}::{name} has empty cells.",
            "Every item needs a value.",
            "Fill them in, or remove these rows.",
        )
    reserve(8 * len(column))
    if kind in ("integer", "number"):
        decoded = isinstance(column, pa.DictionaryArray)
        return (column.dictionary_decode() if decoded else column).to_numpy(zero_copy_only=False)
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    texts = np.array(column.dictionary.to_pylist(), object)
    return texts[column.indices.to_numpy(zero_copy_only=False)]
