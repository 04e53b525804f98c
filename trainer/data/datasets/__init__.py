"""The table of data sets, and `load`. The module of a data set is imported when it is loaded.

A module has `read(root, **options) -> DataSet`; the keyword-only parameters are the options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from retrieval import registry
from retrieval.errors import DmlError
from retrieval.registry import Registry
from trainer import parameters
from trainer.data.datasets.records import DataSet

__all__ = [
    "DATASETS",
    "DataSet",
    "Entry",
    "check",
    "kind_of",
    "load",
    "options_of",
    "recall_at_of",
]


@dataclass(frozen=True)
class Entry(registry.Entry):
    """A data set, and what has to be known of it before it is read."""

    needs_root: bool = True
    """It reads files, so it has to be told where they are."""
    takes_all_images: bool = False
    """Every image below its root belongs to it, so nothing else may be written there."""
    display_options: Mapping[str, object] = field(default_factory=dict)
    """Options that give a report all images with the least work."""
    presets: str = ""
    """What the names of its presets start with, if not its own name."""
    recall_at: tuple[int, ...] = ()
    """The values of K that papers give for Recall@K; none: the usual ones."""


DATASETS = Registry(
    "data set",
    Entry(
        "glyphs",
        "trainer.data.datasets.glyphs:read",
        "letters drawn from matplotlib's fonts; no download",
        needs_root=False,
        display_options={"copies": 1},
    ),
    Entry(
        "folder",
        "trainer.data.datasets.folder:read",
        "one folder of images per class, or such folders under train/, test/, ...",
        takes_all_images=True,
    ),
    Entry(
        "csv",
        "trainer.data.datasets.csv:read",
        "CSV table of images with the columns path, label and optionally split",
    ),
    Entry(
        "cub",
        "trainer.data.datasets.cub:read",
        "CUB-200-2011: 200 species of birds",
        recall_at=(1, 2, 4, 8, 16, 32),
    ),
    Entry(
        "cars",
        "trainer.data.datasets.cars:read",
        "Cars196: 196 models of cars",
        recall_at=(1, 2, 4, 8, 16, 32),
    ),
    Entry(
        "sop",
        "trainer.data.datasets.sop:read",
        "Stanford Online Products: 22,634 products",
        recall_at=(1, 10, 100, 1000),
    ),
    Entry(
        "inshop",
        "trainer.data.datasets.inshop:read",
        "DeepFashion In-Shop: 7,982 garments, with query and gallery",
        recall_at=(1, 10, 20, 30, 40, 50),
    ),
    Entry(
        "idx",
        "trainer.data.datasets.idx:read",
        "MNIST and similar files, gzipped or not; train and test share classes",
        presets="fashion",
    ),
    option="--dataset",
    listed="datasets",
)


def recall_at_of(name: str) -> tuple[int, ...]:
    """The values of K that papers give for a data set; none if it has no usual ones of its own."""
    entry = DATASETS.entries.get(name)
    return entry.recall_at if entry else ()


def kind_of(place: str | Path) -> str:
    """The data set that a path without the name of one means: a table, or a folder of classes."""
    return "csv" if Path(place).expanduser().is_file() else "folder"


def load(name: str, root: str | Path | None = None, /, **options: object) -> DataSet:
    """Load the named data set from root, with the options of its reader."""
    entry = DATASETS.find(name)
    if root is None and entry.needs_root:
        raise DmlError(
            f"The data set {name} needs to know where its files are.",
            f"`dmltool list datasets` says of it: {entry.summary}.",
            f"Name the place: --dataset {name} --data FOLDER",
        )
    if root is not None and not entry.needs_root:
        raise DmlError(
            f"The data set {name} reads no files, but was given {root}.",
            f"`dmltool list datasets` says of it: {entry.summary}.",
            "Leave out --data, or choose another data set: --dataset folder",
        )
    known = check(name, options)
    where = [] if root is None else [Path(root).expanduser()]
    data = entry.load()(*where, **options)
    return replace(data, options={**known, **options})


def check(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """Raise for a data set or an option that does not exist, or for a value of another type.

    Returns the options' defaults.
    """
    taken = parameters.options_of(DATASETS.find(name).load())
    parameters.check_options(f"The data set {name!r}", options, taken, {}, "data.options")
    return options_of(name)


def options_of(name: str) -> dict[str, object]:
    """The options that a data set takes, and their defaults."""
    taken = parameters.options_of(DATASETS.find(name).load())
    return {option: parameter.default for option, parameter in taken.items()}
