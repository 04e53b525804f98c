"""Your own images: one folder for each class, whose name is the label.

Where the folders directly under the root are called train, test and the like, they are the
splits and the class folders lie in them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from retrieval.errors import DmlError
from retrieval.splits import SPELLINGS
from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet, build, counted, listed, unlabelled
from trainer.data.datasets.splitting import divide, shared_classes

SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".gif",
        ".bmp",
        ".webp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".jp2",
        ".avif",
    ]
)


def read(
    root: Path, *, test_fraction: float = 0.25, val_fraction: float = 0.0, seed: int = 0
) -> DataSet:
    """Whole classes are held out for test and val, by fraction and seed."""
    layout.folder(root)
    tops = _folders(root)
    if tops and all(top.lower() in SPELLINGS for top in tops):
        return _given(root, tops)
    others: dict[str, Counter[str]] = {top: Counter() for top in tops}
    images = {top: list(_images(root, top, others[top])) for top in tops}
    empty = _without_empty(root, images)
    nested = [
        top
        for top, paths in images.items()
        if top.lower() in SPELLINGS and all(path.count("/") > 1 for path in paths)
    ]
    if len(nested) == len(images):  # such as train and test beside a folder of notes
        beside = sum((others[top] for top in tops if top not in nested), Counter())
        return _given(root, nested, empty, beside)
    notes = [*empty, *_left_out(root, sum(others.values(), Counter())), *_loose(root)]
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
    others: Counter[str] = Counter()
    rows = [(path.removeprefix("./"), "", "test") for path in _images(root, "", others)]
    notes = _left_out(root, others)
    return unlabelled(build("folder", root, rows, notes=notes)) if rows else None


def _given(
    root: Path, tops: list[str], found: Sequence[str] = (), beside: Counter[str] | None = None
) -> DataSet:
    """The splits as the folders say.

    found: notes on what lies beside the splits. beside: suffixes of files there, which are added to
    those of other files that are no images.
    """
    rows: list[tuple[str, str, str]] = []
    sides: dict[str, set[str]] = {}
    notes = [*found, *_loose(root)]
    others = Counter(beside)
    for top in tops:
        names = _folders(root / top)
        images = {name: list(_images(root, f"{top}/{name}", others)) for name in names}
        notes += [*_without_empty(root / top, images), *_loose(root / top)]
        split = SPELLINGS[top.lower()]
        sides.setdefault(split, set()).update(images)
        rows += [(path, name, split) for name, paths in images.items() for path in paths]
    notes += _left_out(root, others)
    return build("folder", root, rows, notes=[*notes, *shared_classes(sides)])


def _without_empty(root: Path, images: dict[str, list[str]]) -> list[str]:
    """Takes class folders without images out of the dict; a note that names them."""
    if not images:
        raise DmlError(
            f"{root} holds no folders.",
            "Each class has a folder of its own, named as the class: cats/1.jpg, dogs/1.jpg.",
            "Move the images into folders, or list them in a table: --dataset csv",
        )
    empty = [name for name, paths in images.items() if not paths]
    if len(empty) == len(images):
        raise DmlError(
            f"{root}: none of {len(images):,} folders holds images.",
            f"Empty: {listed(empty)}. Known image files: {' '.join(sorted(SUFFIXES))}.",
            "Add images to these folders, or name another folder: --data FOLDER",
        )
    for name in empty:
        del images[name]
    folders = "1 folder" if len(empty) == 1 else f"{len(empty):,} folders"
    return [f"{root}: {folders} without images left out: {listed(empty)}."] if empty else []


def _left_out(root: Path, others: Counter[str]) -> list[str]:
    """A note about files that are no images by their suffix, such as photographs in HEIC."""
    if not others:
        return []
    kinds = listed(f"{number:,} {suffix}" for suffix, number in others.most_common())
    return [f"{root}: files left out because of their suffix: {kinds}."]


def _loose(root: Path) -> list[str]:
    """A note about images that lie beside the folders of classes."""
    loose = [file for file in sorted(os.listdir(root)) if _suffix(file) in SUFFIXES]
    if not loose:
        return []
    images = counted(len(loose), "image")
    return [f"{root}: {images} beside the class folders left out: {listed(loose)}."]


def _folders(root: Path) -> list[str]:
    """Folders by name, without hidden ones and what unzipping on a Mac leaves behind."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError as error:
        raise layout.unreadable(root, error) from error
    return sorted(name for name in names if not name.startswith(".") and name != "__MACOSX")


def _images(root: Path, inside: str, others: Counter[str]) -> Iterator[str]:
    """Image files in a folder and below, sorted, relative to root.

    others: counts the suffixes of files that are not images.
    """

    def refuse(error: OSError) -> None:
        raise layout.unreadable(Path(error.filename), error) from error

    for folder, below, files in os.walk(root / inside, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith("."))
        parent = Path(folder).relative_to(root).as_posix()
        for file in sorted(files):
            if _suffix(file) in SUFFIXES:
                yield f"{parent}/{file}"
            elif not file.startswith("."):
                others[_suffix(file) or "without a suffix"] += 1


def _suffix(file: str) -> str:
    """The suffix in lower case; nothing for hidden files."""
    return "" if file.startswith(".") else os.path.splitext(file)[1].lower()
