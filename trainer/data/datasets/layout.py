"""Find the files of official data sets, refuse hostile paths, and check the counts."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from retrieval.errors import DmlError, listed
from retrieval.files import names_in, nearest_folder
from retrieval.registry import nearest
from trainer.data.datasets.records import DataSet, Row, build

# A root, a Windows drive, a step upward, or NUL. Symbolic links are not looked at: whoever made
# them on this disk chose where they lead, which cannot be said of a line in a downloaded file.
_OUTSIDE = re.compile(r"^[/\\]|^[A-Za-z]:|(?:^|[/\\])\.\.(?:[/\\]|$)|\0")
GO_ON = (
    "Complete the files, or use the files that are there: --allow-incomplete "
    "(embed: --skip-bad; in Python: allow_incomplete=True). Scores are then not comparable with "
    "published ones."
)


def folder(root: Path) -> Path:
    """The root, if it is a folder that can be listed."""
    if not root.exists():
        above = nearest_folder(root.absolute())
        name, *rest = root.absolute().relative_to(above).parts
        names = names_in(above)
        near = "" if rest else nearest(name, names)
        raise DmlError(
            f"There is no folder {root}.",
            f"The folder {above} exists." + (f" It holds {_shown(names)}." if names else ""),
            f"Did you mean {root.with_name(near)}?"
            if near
            else "Give the place of the data set: --data FOLDER (embed: NAME:FOLDER)",
        )
    if not root.is_dir():
        raise DmlError(
            f"{root} is not a folder.",
            "The data set is read from the files in one.",
            "Unpack it, and give its folder: --data FOLDER (embed: NAME:FOLDER)",
        )
    _listing(root)
    return root


def locate(root: Path, name: str, *markers: str, inside: Sequence[str] = ()) -> Path:
    """The first of root and its folders `inside` that holds one of the marker files."""
    folder(root)
    for place in (root, *(root / sub for sub in inside)):
        if any((place / marker).is_file() for marker in markers):
            return place
    raise DmlError(
        f"{root} does not look like {name}: there is no {' and no '.join(markers)}.",
        f"It holds {_shown(_listing(root))}.",
        f"Give the folder that holds {markers[0]}: --data FOLDER (embed: NAME:FOLDER)",
    )


def relative(text: str, source: Path, line: int) -> str:
    """The path as a file names it, if it stays under the root."""
    if _OUTSIDE.search(text) or not text.strip():
        raise DmlError(
            f"{source}, entry {line}: the path {text!r} leads outside the data set.",
            "Paths are relative to the data set's folder, without a leading / and without `..`.",
            "Get the file from its source again, or correct this entry.",
        )
    return text.removeprefix("./")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, numbered from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, line.strip()


def fields(path: Path, line: int, text: str, count: int, form: str) -> list[str]:
    """The words of a line; the last may hold spaces."""
    words = text.split(maxsplit=count - 1)
    if len(words) != count:
        raise unofficial(path, line, f"{text[:80]!r} is not `{form}`.")
    return words


def number(path: Path, line: int, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise unofficial(path, line, f"{text[:40]!r} is not a whole number.") from None


def unofficial(path: Path, line: int, what: str) -> DmlError:
    """The error for a line that the official file does not have."""
    return DmlError(
        f"{path}, line {line}: {what}",
        "The file is not the official one, or was cut short.",
        "Get the file from its source again.",
    )


def unreadable(path: Path, error: Exception) -> DmlError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DmlError(
        f"{path} cannot be read.",
        f"The reader says: {type(error).__name__}: {why}.",
        "Get the file from its source again.",
    )


def official(
    name: str,
    root: Path,
    rows: list[Row],
    expected: dict[str, tuple[int, int]],
    allow_incomplete: bool,
    source: Path,
) -> DataSet:
    """The data set, if all files are there and each split has its published size."""
    kept, absent = present(root, rows, source)
    found = build(name, root, kept).counts() if kept else {}
    notes = []
    if absent or found != expected:
        why = f"{_difference(expected, found)} {absent}".strip()
        if not allow_incomplete or not kept:
            raise DmlError(f"{name}: {root} is not the complete data set.", why, GO_ON)
        notes = [f"Incomplete, not comparable with published scores. {why}"]
    return build(name, root, kept, notes=notes)


def _difference(expected: dict[str, tuple[int, int]], found: dict[str, tuple[int, int]]) -> str:
    parts = []
    for split in dict.fromkeys([*expected, *found]):
        (images, classes), (here, of) = expected.get(split, (0, 0)), found.get(split, (0, 0))
        parts.append(
            f"{split}: expected {images:,} images of {classes:,} classes, found {here:,} of {of:,}."
        )
    return " ".join(parts)


def present(root: Path, rows: list[Row], source: Path) -> tuple[list[Row], str]:
    """The rows whose files are there, and a sentence about the others; each folder is listed once.

    source: the file that names them.
    """
    inside: dict[str, set[str]] = {}
    kept: list[Row] = []
    absent: list[Row] = []
    for row in rows:
        parent, _, name = row[0].rpartition("/")
        if parent not in inside:
            inside[parent] = set()
            with suppress(OSError):
                inside[parent] = set(os.listdir(root / parent))
        # A disk may know a name under other letters: case, composed accents.
        there = name in inside[parent] or os.path.exists(root / row[0])
        (kept if there else absent).append(row)
    if not absent:
        return kept, ""
    examples = listed(row[0] for row in absent[:3])
    return kept, (
        f"{len(absent):,} of {len(rows):,} files that {source.name} names are missing in {root}: "
        f"{examples}."
    )


def _listing(root: Path) -> list[str]:
    try:
        return sorted(os.listdir(root))
    except OSError as error:
        raise unreadable(root, error) from error


def _shown(names: Iterable[str]) -> str:
    return listed(name for name in names if not name.startswith(".")) or "nothing"
