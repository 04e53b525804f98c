"""Your own images: one folder for each class, whose name is the label.

Where the folders directly under the root are called train, test and the like, they are the
splits and the class folders lie in them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from retrieval.embeddings import SPELLINGS
from retrieval.errors import DmlError, listed
from retrieval.number_format import counted
from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet, Row, build, unlabelled
from trainer.data.datasets.splitting import divide, shared_classes

JPEG = {".jpg", ".jpeg", ".jpe", ".jfif", ".jp2"}
NETPBM = {".ppm", ".pgm", ".pbm", ".pnm"}
SUFFIXES = JPEG | NETPBM | {".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".avif"}


def read(
    root: Path, *, test_fraction: float = 0.25, val_fraction: float = 0.0, seed: int = 0
) -> DataSet:
    """Whole classes are held out for test and val, by fraction and seed."""
    layout.folder(root)
    found = {top: _files(root, top) for top in _folders(root)}
    if found and all(top.lower() in SPELLINGS for top in found):
        return _given(root, found, list(found))
    images = {top: files.images for top, files in found.items()}
    others = [path for files in found.values() for path in files.others]
    empty = _without_empty(root, images, others)
    nested = [
        top
        for top, paths in images.items()
        if top.lower() in SPELLINGS and all(path.count("/") > 1 for path in paths)
    ]
    if len(nested) == len(images):  # such as train and test beside a folder of notes
        return _given(root, found, nested, empty)
    notes = [*empty, *_left_out(root, others), *_loose(root)]
    if nested:
        more = [top for top in images if top not in nested]
        also = f"the folder {more[0]} also holds images. Move it"
        if len(more) > 1:
            also = f"the folders {listed(more)} also hold images. Move them"
        notes.append(
            f"{root}: {listed(nested)} taken as classes, not as splits, because {also} away to use "
            f"{' and '.join(nested)} as splits."
        )
    splits = divide(root, list(images), test_fraction, val_fraction, seed)
    rows = ((path, label, splits[label]) for label, paths in images.items() for path in paths)
    return build("folder", root, rows, notes=notes)


def read_flat(root: Path) -> DataSet | None:
    """Images that lie in a folder without folders of classes, unlabelled; None where there are
    such folders, or no images.
    """
    layout.folder(root)
    if _folders(root):
        return None
    files = _files(root, "")
    rows = [(path.removeprefix("./"), "", "test") for path in files.images]
    notes = _left_out(root, files.others)
    return unlabelled(build("folder", root, rows, notes=notes)) if rows else None


def _given(
    root: Path, found: Mapping[str, Files], tops: Sequence[str], notes: Sequence[str] = ()
) -> DataSet:
    """The splits as the folders say.

    found: the files of each folder in root. tops: those folders that are splits. notes: on what
    lies beside them.
    """
    rows: list[Row] = []
    notes = [*notes, *_loose(root)]
    for top in tops:
        images: dict[str, list[str]] = {name: [] for name in _folders(root / top)}
        for path in found[top].images:
            if path.count("/") > 1:  # else it lies beside the class folders
                images[path.split("/")[1]].append(path)
        notes += [*_without_empty(root / top, images, found[top].others), *_loose(root / top)]
        split = SPELLINGS[top.lower()]
        rows += [(path, name, split) for name, paths in images.items() for path in paths]
    others = [
        path
        for top, files in found.items()
        for path in files.others
        if top not in tops or path.count("/") > 1
    ]
    notes += _left_out(root, others)
    return build("folder", root, rows, notes=[*notes, *shared_classes(rows)])


def _without_empty(
    root: Path, images: dict[str, list[str]], others: Sequence[str] = ()
) -> list[str]:
    """Takes class folders without images out of the dict; a note that names them.

    others: the files in them that are no images by their suffix.
    """
    if not images:
        raise DmlError(
            f"{root} holds no folders.",
            "Each class has a folder of its own, named as the class: cats/1.jpg, dogs/1.jpg.",
            "Move the images into folders, or give a table (.csv) of them instead of the folder.",
        )
    empty = [name for name, paths in images.items() if not paths]
    if len(empty) == len(images):
        holding = f"They hold {_kinds(others)}" if others else f"Empty: {listed(empty)}"
        raise DmlError(
            f"{root}: none of {len(images):,} folders holds images.",
            f"{holding}. Known image files: {' '.join(sorted(SUFFIXES))}.",
            "Convert the files to one of these kinds, or name another folder."
            if others
            else "Add images to these folders, or name another folder.",
        )
    for name in empty:
        del images[name]
    folders = counted(len(empty), "folder")
    return [f"{root}: {folders} without images left out: {listed(empty)}."] if empty else []


def _left_out(root: Path, others: Sequence[str]) -> list[str]:
    """A note about files that are no images by their suffix, such as photographs in HEIC."""
    if not others:
        return []
    return [f"{root}: files left out because of their suffix: {_kinds(others)}."]


def _kinds(files: Sequence[str]) -> str:
    """How many files there are of each suffix: 12 .heic, 1 .txt."""
    suffixes = Counter(_suffix(os.path.basename(path)) or "without a suffix" for path in files)
    return listed(f"{number:,} {suffix}" for suffix, number in suffixes.most_common())


def _loose(root: Path) -> list[str]:
    """A note about images that lie beside the folders of classes."""
    loose = [file for file in sorted(os.listdir(root)) if _suffix(file) in SUFFIXES]
    if not loose:
        return []
    images = counted(len(loose), "image")
    return [f"{root}: {images} beside the class folders left out: {listed(loose)}."]


def _folders(root: Path) -> list[str]:
    """Folders that are read, by name."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError as error:
        raise layout.unreadable(root, error) from error
    return _read(names)


def _read(names: Iterable[str]) -> list[str]:
    """Sort names of folders, without hidden ones and what unzipping on a Mac leaves behind."""
    return sorted(name for name in names if not name.startswith(".") and name != "__MACOSX")


class Files(NamedTuple):
    """Files in a folder and below, sorted, relative to the root; none that are hidden."""

    images: list[str]
    others: list[str]


def _files(root: Path, inside: str) -> Files:
    """List a folder. It and the class folders of a split may be links; others are not followed."""

    def refuse(error: OSError) -> None:
        raise layout.unreadable(Path(error.filename), error) from error

    found, top = Files([], []), str(root / inside)
    for folder, below, files in os.walk(top, onerror=refuse, followlinks=True):
        follow = folder == top and inside.lower() in SPELLINGS
        below[:] = _read(
            name for name in below if follow or not os.path.islink(os.path.join(folder, name))
        )
        parent = Path(folder).relative_to(root).as_posix()
        for file in sorted(files):
            if not file.startswith("."):
                images = _suffix(file) in SUFFIXES
                (found.images if images else found.others).append(f"{parent}/{file}")
    return found


def _suffix(file: str) -> str:
    """The suffix in lower case; nothing for hidden files."""
    return "" if file.startswith(".") else os.path.splitext(file)[1].lower()
