"""A table of images: columns path, label and split, separated by comma, semicolon or tab."""

import csv
import io
import os
from contextlib import suppress
from pathlib import Path

from retrieval.embeddings import SPELLINGS
from retrieval.errors import DmlError, listed
from retrieval.registry import nearest
from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet, Row, build, unlabelled
from trainer.data.datasets.splitting import divide, shared_classes

PATHS = ("path", "file", "filename", "image", "image_path", "file_name")
HEADER = 1 << 16  # characters of the first line
LABELS = ("label", "class", "target", "category", "item_id")


def read(
    root: Path,
    *,
    images: str | None = None,
    test_fraction: float = 0.25,
    val_fraction: float = 0.0,
    seed: int = 0,
    allow_incomplete: bool = False,
) -> DataSet:
    """Read a table, or the one in a folder; paths are relative to `images`, or to its folder.

    Without a split column whole classes are held out, as for a folder.
    """
    table = _table(root)
    base = layout.folder(Path(images).expanduser()) if images else table.parent
    rows, notes = _present(table, base, _rows(table, base), allow_incomplete)
    if not any(split for _, _, split in rows):
        labels = list(dict.fromkeys(label for _, label, _ in rows))
        splits = divide(table, labels, test_fraction, val_fraction, seed)
        rows = [(path, label, splits[label]) for path, label, _ in rows]
    return build("csv", base, rows, notes=[*notes, *shared_classes(rows)])


def read_unlabelled(table: Path, allow_incomplete: bool = False) -> DataSet | None:
    """The images of a table without a column of labels; None where it has one, or no paths."""
    with suppress(OSError, UnicodeDecodeError), table.open(encoding="utf-8-sig") as file:
        first = file.readline(HEADER)
        header = {name.strip().strip('"').lower() for name in first.split(_delimiter(first))}
        if header & set(PATHS) and not header & set(LABELS):
            found = _rows(table, table.parent, False)
            rows, notes = _present(table, table.parent, found, allow_incomplete)
            rows = [(path, label, split or "test") for path, label, split in rows]
            return unlabelled(build("csv", table.parent, rows, notes=notes))
    return None


def _present(
    table: Path, base: Path, rows: list[Row], allow_incomplete: bool
) -> tuple[list[Row], list[str]]:
    """The rows whose files are there, and a note about the others."""
    kept, absent = layout.present(base, rows, table)
    if absent and not (allow_incomplete and kept):
        raise DmlError(
            f"{table} names files that are missing.",
            absent,
            "Complete them, leave these out: --allow-incomplete (embed: --skip-bad), or say where "
            "the images are: --set data.options.images=FOLDER (train only)",
        )
    return kept, [absent] if absent else []


def _table(root: Path) -> Path:
    if root.is_dir():
        tables = sorted(p for p in root.iterdir() if p.suffix.lower() in (".csv", ".tsv"))
        if len(tables) != 1:
            found = listed(p.name for p in tables) or "none"
            raise DmlError(
                f"{root} does not hold one table.",
                f"Files ending in .csv or .tsv: {found}.",
                f"Name the table itself instead of the folder: {root / 'TABLE.csv'}",
            )
        return tables[0]
    if not root.is_file():
        raise DmlError(
            f"There is no table {root}.",
            "It has the columns path, label and, if you like, split.",
            "Give its place: --data TABLE.csv (embed: csv:TABLE.csv)",
        )
    return root


def _rows(table: Path, base: Path, labelled: bool = True) -> list[Row]:
    """(path, label, split) of each line; the split is empty where there is no such column."""
    try:
        text = table.read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
        header = [name.strip().lower() for name in next(reader, [])]
        path_at = _column(table, header, PATHS)
        label_at = _column(table, header, LABELS) if labelled else path_at
        split_at = header.index("split") if "split" in header else None
        rows = []
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise _wrong(table, reader.line_num, f"has {len(cells)} cells, not {len(header)}")
            label = cells[label_at].strip()
            if not label:
                raise _wrong(table, reader.line_num, "has no label")
            path = _relative(cells[path_at].strip(), base, table, reader.line_num)
            split = "" if split_at is None else _split(table, reader.line_num, cells[split_at])
            rows.append((path, label, split))
    except UnicodeDecodeError as error:
        raise DmlError(
            f"{table} is not a table in UTF-8.",
            "A data set is a folder of images, or a text file (.csv) that lists them.",
            "Give the folder of the images, or save the table again with the encoding UTF-8.",
        ) from error
    except (OSError, csv.Error) as error:
        raise layout.unreadable(table, error) from error
    if not rows:
        raise DmlError(
            f"{table} lists no images.",
            "It has no lines below the first.",
            "Add a line for each image.",
        )
    return rows


def _delimiter(text: str) -> str:
    header = text.partition("\n")[0]
    return max(",;\t", key=header.count)


def _column(table: Path, header: list[str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    near = nearest(names[0], header)
    raise DmlError(
        f"{table} has no column called {names[0]}.",
        f"Its first line has: {', '.join(header) or 'nothing'}. "
        f"Also understood: {', '.join(names[1:])}.",
        f"Did you mean {near}? Rename it." if near else "Name the columns in the first line.",
    )


def _split(table: Path, line: int, text: str) -> str:
    split = SPELLINGS.get(text.strip().lower())
    if split is None:
        near = nearest(text.strip(), SPELLINGS)
        hint = f"; did you mean {near}?" if near else ""
        raise _wrong(table, line, f"has the split {text.strip()!r}{hint}")
    return split


def _relative(path: str, base: Path, table: Path, line: int) -> str:
    """The path relative to the folder; tables may hold absolute paths of files under it."""
    if os.path.isabs(path):
        inside = os.path.relpath(path, os.path.abspath(base))
        path = path if inside.startswith(os.pardir) else inside
    return layout.relative(path, table, line)


def _wrong(table: Path, line: int, what: str) -> DmlError:
    return DmlError(
        f"{table}, line {line} {what}.",
        "Wanted: path, label and, if there is such a column, a split: "
        "train, val, test, query or gallery.",
        "Correct the line.",
    )
