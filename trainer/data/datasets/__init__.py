"""The table of data sets. A module is imported when its data set is loaded.

A module has `read(root, **options) -> DataSet`; what its signature names are the options.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from retrieval.errors import DmlError
from trainer.data.datasets.records import SPLITS, DataSet, Record

__all__ = [
    "DATASETS",
    "SPLITS",
    "DataSet",
    "Entry",
    "Record",
    "check",
    "find",
    "load",
    "options_of",
]


@dataclass(frozen=True)
class Entry:
    name: str
    function: str  # dotted path
    summary: str
    needs_root: bool = True


DATASETS = (
    Entry(
        "glyphs",
        "trainer.data.datasets.glyphs.read",
        "letters drawn from matplotlib's fonts: nothing to download",
        needs_root=False,
    ),
    Entry(
        "folder",
        "trainer.data.datasets.folder.read",
        "one folder of images for each class, or such folders under train/, test/, ...",
    ),
    Entry(
        "csv",
        "trainer.data.datasets.csv.read",
        "a table of images with the columns path, label and, if you like, split",
    ),
    Entry("cub", "trainer.data.datasets.cub.read", "CUB-200-2011: 200 species of birds"),
    Entry("cars", "trainer.data.datasets.cars.read", "Cars196: 196 models of cars"),
    Entry("sop", "trainer.data.datasets.sop.read", "Stanford Online Products: 22,634 products"),
    Entry(
        "inshop",
        "trainer.data.datasets.inshop.read",
        "DeepFashion In-Shop: 7,982 garments, query and gallery",
    ),
    Entry(
        "idx",
        "trainer.data.datasets.idx.read",
        "the files of MNIST and its family, gzipped or not; same classes in train and test",
    ),
)


def load(name: str, root: str | Path | None = None, **options: object) -> DataSet:
    """The named data set as it lies under root, with the options of its reader."""
    entry = find(name)
    if root is None and entry.needs_root:
        raise DmlError(
            f"The data set {name} needs to know where its files are.",
            entry.summary,
            f"Name the place: --dataset {name} --data FOLDER",
        )
    if root is not None and not entry.needs_root:
        raise DmlError(
            f"The data set {name} reads no files, but was given {root}.",
            entry.summary,
            "Leave out --data, or choose another data set: --dataset folder",
        )
    known = check(name, options)
    module, _, function = entry.function.rpartition(".")
    read = getattr(import_module(module), function)
    where = None if root is None else Path(root).expanduser()
    data = read(where, **options) if entry.needs_root else read(**options)
    return replace(data, options={**known, **options})


def check(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """Raises for a data set or an option that does not exist; the options with their defaults."""
    known = options_of(name)
    for option in options:
        if option not in known:
            of, flag = f" of the data set {name}", "--set data.options.{}=..."
            raise _unknown("option", option, list(known), of, flag)
    return known


def find(name: str) -> Entry:
    for entry in DATASETS:
        if entry.name == name:
            return entry
    raise _unknown("data set", name, [entry.name for entry in DATASETS], flag="--dataset {}")


def options_of(name: str) -> dict[str, object]:
    """The options that a data set takes, and their defaults."""
    module, _, function = find(name).function.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), function)).parameters
    return {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}


def _unknown(kind: str, name: str, known: list[str], of: str = "", flag: str = "") -> DmlError:
    near = difflib.get_close_matches(name.lower(), known, 1, 0.5)
    return DmlError(
        f"There is no {kind} called {name!r}{of}.",
        f"Known: {', '.join(known)}." if known else "It has no options.",
        f"Did you mean {near[0]}? {flag.format(near[0])}" if near else "",
    )
