"""Find the files behind an address as they would be found on a disk, and fetch them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from retrieval.errors import damaged
from retrieval.formats import FORMATS
from retrieval.formats.shards import without_train
from retrieval.loading.folders import LISTINGS, choose, in_natural_order, no_match
from retrieval.remote.address import Address
from retrieval.remote.cache import Entry
from retrieval.remote.store import Found, Store
from retrieval.resources import StageProgress
from retrieval.run_files import EMBEDDINGS

Located = tuple[str, tuple[Path, ...], Path | None]
"""The address without its secrets, the copies, and the copy of a file of labels."""


def fetch(
    address: Address, whole: bool, progress: StageProgress | None, labels: bool = False
) -> Located:
    """Bring copies up to date; unless `whole`, files that are read in parts get holes.

    Inside `leaving_out_train`, files of the split `train` are passed over.
    labels: whether labels are wanted.
    """
    parts = {suffix for format in FORMATS for suffix in format.in_parts if not whole}
    store = Store(address)
    file = None if address.is_pattern else store.file()
    below = address.root if file or address.is_pattern else address.shown
    entry = Entry(store, below, parts, progress)
    if file:
        entry.fetch([file])
        located: Located = address.shown, (entry.data / file.name,), None
    elif address.is_pattern:
        there = _by_name(store.matches())
        if not there:
            raise no_match(address.shown, "Check the address.")
        files = in_natural_order(entry.data / name for name in there)
        located = address.shown, _fetch_set(entry, there, files), None
    else:
        located = _fetch_folder(entry, labels)
    entry.forget_others()
    return located


def _fetch_folder(entry: Entry, wants_labels: bool) -> Located:
    shown = entry.address.shown
    there = _by_name(entry.store.below())
    marks = {mark for format in FORMATS for mark in format.marks}
    if not there or there.keys() & {*LISTINGS, *marks}:
        there = _by_name(entry.store.below(deep=True))
        if marks & {name.partition("/")[0] for name in there}:  # a store is taken as it is
            entry.parts = ()
            entry.fetch(list(there.values()))
            return shown, (entry.data,), None
        entry.fetch([there[name] for name in there if name.split("/")[-1] in LISTINGS])
    names = [name for name in there if "/" not in name]
    files, labels = choose(entry.data, names, wants_labels)
    if labels:
        entry.fetch([there[labels.name]])
    name = f"{shown.rstrip('/')}/{EMBEDDINGS}" if files == (entry.data / EMBEDDINGS,) else shown
    return name, _fetch_set(entry, there, files), labels


def _by_name(files: Iterable[Found]) -> dict[str, Found]:
    return {file.name: file for file in files}


def _fetch_set(
    entry: Entry, there: Mapping[str, Found], files: tuple[Path, ...]
) -> tuple[Path, ...]:
    """Fetch the files of a set, without those of `train` where that is left out."""
    names = {file: file.relative_to(entry.data).as_posix() for file in files}
    if lost := [name for name in names.values() if name not in there]:
        raise damaged(f"{entry.address.shown} lists {lost[0]}, which is not there.")
    wanted = tuple(without_train(files))
    entry.names |= set(names.values())
    entry.fetch([there[names[file]] for file in wanted])
    return wanted
