"""Hold out classes for validation, check that the others can fill a batch, and choose splits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.embeddings import HELD_OUT, SPLITS
from retrieval.errors import DmlError, listed
from retrieval.number_format import counted
from retrieval.settings import Checked, within
from trainer.data.datasets.records import DataSet, Row

# With a single class every answer is right, and with a single training class nothing is learnt.
FEWEST = 2


def shuffled(names: Iterable[str], seed: int) -> list[str]:
    """The names in an order that depends on each name and the seed alone."""
    return sorted(names, key=lambda name: hashlib.sha256(os.fsencode(f"{seed}\0{name}")).digest())


def held_out(classes: int, fraction: float, option: str) -> int:
    """The number of classes that a fraction means; at least two unless it is zero."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise DmlError(
            f"{option} is {fraction!r}.",
            "It is the share of the classes to hold out: at least 0 and below 1.",
            "Write, for example: --set "
            f"data.{'' if option == 'val_fraction' else 'options.'}{option}=0.2",
        )
    return 0 if fraction == 0 else max(FEWEST, round(fraction * classes))


def divide(
    source: Path, names: list[str], test_fraction: float, val_fraction: float, seed: int
) -> dict[str, str]:
    """The split of each class: whole classes are held out for test and val."""
    test = held_out(len(names), test_fraction, "test_fraction")
    val = held_out(len(names), val_fraction, "val_fraction")
    if test + val and len(names) - test - val < FEWEST:
        raise DmlError(
            f"{source}: {counted(len(names), 'class', 'classes')} cannot be divided.",
            f"{test} would be held out for test and {val} for validation; "
            f"training needs at least {FEWEST}.",
            "Add classes."
            if len(names) < FEWEST
            else "Add classes, or train on all of them: --set data.options.test_fraction=0 "
            f"--select last (embed: {source}, without the name of a data set before it)",
        )
    order = shuffled(names, seed)
    return {
        name: "test" if place < test else "val" if place < test + val else "train"
        for place, name in enumerate(order)
    }


def shared_classes(rows: Sequence[Row]) -> list[str]:
    """A note if classes are trained on and tested too: such scores say little of new classes."""
    trained = {label for _, label, split in rows if split == "train"}
    both = sorted(trained & {label for _, label, split in rows if split != "train"})
    if not both:
        return []
    return [
        f"Train and held-out images share {counted(len(both), 'class', 'classes')} "
        f"({listed(both, 3)}): "
        "the scores do not show how the network does on new classes."
    ]


def with_validation(data: DataSet, fraction: float = 0.1, seed: int = 0) -> DataSet:
    """Move a share of the training classes, whole, to `val`.

    Only classes of two images and more are moved: a lone image has nothing to find. A data set
    that already has a `val` split stays as it is.
    """
    if len(data.rows("val")):
        return data
    rows = data.rows("train")
    sizes = training_sizes(data)
    movable = {data.label_names[c]: c for c in np.flatnonzero(sizes >= 2)}
    count = held_out(int(np.count_nonzero(sizes)), fraction, "val_fraction")
    if count == 0:
        return data
    left = np.count_nonzero(sizes) - count
    if count > len(movable) or left < FEWEST:
        raise DmlError(
            f"{data.name}: too few classes to cut a validation set from.",
            f"{count} of {np.count_nonzero(sizes)} training classes would be held out "
            f"({len(movable)} have two images or more), and {FEWEST} must be left to train on.",
            "Add classes of two images or more, or train without validation: --select last",
        )
    chosen = [movable[name] for name in shuffled(movable, seed)[:count]]
    splits = data.splits.copy()
    splits[rows[np.isin(data.labels[rows], chosen)]] = SPLITS.index("val")
    return replace(data, splits=splits)


@dataclass(frozen=True)
class Division(Checked):
    """Which training classes a run leaves out, and which it holds out for validation."""

    min_images: int = within(1, 10**6, default=1)
    """Classes with fewer images are left out."""
    val_fraction: float = within(0, 0.9, default=0.1)
    """Share of the classes that are held out; 0 if the run chooses its epoch without them."""
    val_seed: int = 0

    def __post_init__(self) -> None:
        self.require_valid()

    @classmethod
    def of_run(cls, data: Mapping[str, Any], select: str) -> Division:
        """That of a run with these settings `data` and this `run.select`."""
        fraction = data["val_fraction"] if select == "val" else 0.0
        return cls(data["min_images"], fraction, data["val_seed"])

    def of(self, data: DataSet) -> DataSet:
        """The data set as the run divides it."""
        if self.min_images > 1:
            data = without_small_classes(data, self.min_images)
        return with_validation(data, self.val_fraction, self.val_seed)


def training_sizes(data: DataSet) -> np.ndarray:
    """(C,) training images of each class."""
    return np.bincount(data.labels[data.rows("train")], minlength=len(data.label_names))


def check_batches(data: DataSet, classes: int, images: int, *, repeat: bool = False) -> None:
    """Raise unless the training set can fill batches of `classes` classes x `images` images.

    repeat: a class with too few images gives some of them twice.
    """
    sizes = training_sizes(data)
    present = np.flatnonzero(sizes)
    if len(present) < classes:
        raise DmlError(
            f"{data.name}: a batch needs {counted(classes, 'class', 'classes')}, train has "
            f"{len(present)}.",
            f"Batches are made of {classes} classes x {images} images each.",
            f"Use at most {counted(len(present), 'class', 'classes')} in a batch, or add classes.",
        )
    small = present[sizes[present] < images]
    if len(small) and not repeat:
        names = listed(f"{data.label_names[c]} ({sizes[c]})" for c in small)
        enough = int(np.count_nonzero(sizes >= images))
        ways = [
            f"use at most {sizes[small].min()} images of a class in a batch",
            "add images",
            "repeat them (--set batches.repeat=true)",
        ]
        if enough:
            remain = counted(enough, "class remains", "classes remain")
            ways.append(f"leave these classes out (--min-images {images}: {remain})")
        fix = f"{', '.join(ways[:-1])}, or {ways[-1]}."
        raise DmlError(
            f"{data.name}: {len(small):,} of {len(present):,} training classes have fewer than "
            f"{images} images.",
            f"Too few: {names}.",
            fix[0].upper() + fix[1:],
        )


def without_small_classes(data: DataSet, images: int) -> DataSet:
    """Leave out the training classes that have fewer than `images` images."""
    rows = data.rows("train")
    sizes = training_sizes(data)
    small = (sizes > 0) & (sizes < images)
    if not small.any():
        return data
    if not (sizes >= images).any():
        raise DmlError(
            f"{data.name}: no classes are left.",
            f"None of the {np.count_nonzero(sizes):,} classes of train has {images} images; "
            f"the largest has {sizes.max()}.",
            f"Require fewer images of a class, --min-images {sizes.max()}, or add images.",
        )
    classes = counted(int(np.count_nonzero(small)), "class", "classes")
    note = f"{classes} with fewer than {images} images left out."
    return data.take(np.delete(np.arange(len(data)), rows[small[data.labels[rows]]]), note)


def chosen_splits(data: DataSet, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Rows of the wanted splits by name; by default of test, or of query and gallery."""
    there = data.counts()
    names = list(wanted) or [name for name in HELD_OUT if name in there]
    missing = [name for name in names if name not in there]
    if missing or not names:
        raise DmlError(
            f"The data set {data.name} has no split {', '.join(missing) or 'to test on'}.",
            f"It has: {', '.join(there)}.",
            f"Choose one of them: --split {next(iter(there))}",
        )
    return {name: data.rows(name) for name in names}
