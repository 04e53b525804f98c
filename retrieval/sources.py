"""Find the files that a name stands for: a file, a run folder, a pattern, shards, an address."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retrieval.errors import DmlError, damaged
from retrieval.formats import COMPRESSED, FORMATS, find_format, store_format
from retrieval.formats.arrays import file_size
from retrieval.formats.shards import without_train
from retrieval.remote import ranges
from retrieval.remote.address import Address, is_address, parse
from retrieval.remote.cache import Entry, addresses_in_errors, shown
from retrieval.remote.store import Found, Store
from retrieval.resources import StageProgress
from retrieval.splits import SPELLINGS, leaving_out_train

LISTING = 1 << 24  # bytes of a state.json that are read; it lists some hundred files


@dataclass(frozen=True)
class Place:
    """What a name on the command line stands for."""

    name: Path | str
    """As people see it."""
    files: tuple[Path, ...]
    """In natural order. One file, which need not exist, or the shards of one set."""
    key: str | None
    labels: Path | None = None
    """A file of labels that belongs to the others."""

    @property
    def is_set(self) -> bool:
        return self.files != (self.name,)


def locate(source: str | Path, progress: StageProgress | None = None, whole: bool = False) -> Place:
    """`file.h5::key` -> the file and the key; for a run folder, the embeddings in it.

    Files behind an address are downloaded, unless copies of them are in the cache. Those that
    `load` can read in parts get copies with holes, unless they are wanted whole. Inside
    `leaving_out_train`, those of `train` are passed over.
    """
    text = str(source)
    if is_address(text):
        parts = {s for format in FORMATS for s in format.in_parts if not whole}
        return _behind(parse(text), frozenset(parts), progress)
    if not text.partition("::")[0]:
        raise DmlError(
            "The name of a file is empty.",
            "A variable of the shell may not be set.",
            "Give the name of a file: dmltool eval embeddings.h5",
        )
    key = None
    if "::" in text and not os.path.exists(text):
        text, _, key = text.rpartition("::")
    inside = os.path.join(text, "embeddings.h5")
    path = Path(inside if os.path.isfile(inside) else text)
    if pair := _projector(path):
        return Place(path, pair[:1], key or None, pair[1])
    return Place(path, _files(path), key or None)


def _projector(path: Path) -> tuple[Path, Path] | None:
    """The vectors and the labels of a folder as TensorBoard's projector has it."""
    labels = path / "metadata.tsv"
    for name in ("vectors.tsv", "tensors.tsv"):
        if (path / name).is_file() and labels.is_file():
            return path / name, labels
    return None


def _behind(address: Address, parts: frozenset[str], progress: StageProgress | None) -> Place:
    """Copies of the files behind an address, found there as they would be on a disk."""
    store = Store(address)
    if address.is_pattern:
        entry = Entry(address, address.root, progress)
        found = {file.name: file for file in store.matches()}
        if not found:
            raise _no_match(address.shown)
        files = _fetch_set(store, entry, found, _sorted(entry.data / name for name in found), parts)
        place = Place(address.shown, files, address.key)
    elif file := store.file():
        entry = Entry(address, address.root, progress)
        entry.fetch(store, [file], parts)
        place = Place(address.shown, (entry.data / file.name,), address.key)
    else:
        entry = Entry(address, address.shown, progress)
        place = _folder_behind(address, store, entry, parts)
    entry.forget_others()
    return place


def _folder_behind(address: Address, store: Store, entry: Entry, parts: frozenset[str]) -> Place:
    there = {file.name: file for file in store.below()}
    listings = ("state.json", "dataset_dict.json")
    marks = {mark for format in FORMATS for mark in format.marks}
    if not there or any(name in there for name in (*listings, *marks)):
        there = {file.name: file for file in store.below(deep=True)}
        if marks & {name.partition("/")[0] for name in there}:  # a store is taken as it is
            entry.fetch(store, list(there.values()))
            return Place(address.shown, (entry.data,), address.key)
        told = [file for name, file in there.items() if name.split("/")[-1] in listings]
        entry.fetch(store, told)
    if "embeddings.h5" in there:
        entry.fetch(store, [there["embeddings.h5"]], parts)
        name = f"{address.shown.rstrip('/')}/embeddings.h5"
        return Place(name, (entry.data / "embeddings.h5",), address.key)
    for pair in (("vectors.tsv", "metadata.tsv"), ("tensors.tsv", "metadata.tsv")):
        if all(name in there for name in pair):
            entry.fetch(store, [there[name] for name in pair])
            vectors, labels = (entry.data / name for name in pair)
            return Place(address.shown, (vectors,), address.key, labels)
    files = _in_folder(entry.data, [name for name in there if "/" not in name])
    return Place(address.shown, _fetch_set(store, entry, there, files, parts), address.key)


def _fetch_set(
    store: Store,
    entry: Entry,
    there: Mapping[str, Found],
    files: Sequence[Path],
    parts: frozenset[str],
) -> tuple[Path, ...]:
    """Fetch the files of a set, without those of `train` where that is left out."""
    names = {file: file.relative_to(entry.data).as_posix() for file in files}
    if lost := [name for name in names.values() if name not in there]:
        raise damaged(f"{entry.address.shown} lists {lost[0]}, which is not there.")
    wanted = tuple(without_train(files))
    entry.names |= set(names.values())
    entry.fetch(store, [there[names[file]] for file in wanted], parts)
    return wanted


def natural(path: Path) -> tuple[list[str | int], str]:
    """A key to sort by that puts part-2 before part-10."""
    pieces = re.split(r"([0-9]+)", str(path))
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)], str(path)


def _files(path: Path) -> tuple[Path, ...]:
    if store_format(path):
        return (path,)
    if path.is_dir():
        return _in_folder(path, os.listdir(path))
    if glob.has_magic(str(path)) and not path.exists():
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        if files := _sorted(file for file in found if not file.is_dir() or store_format(file)):
            return files
        raise _no_match(str(path))
    return (path,)


def _no_match(pattern: str) -> DmlError:
    return DmlError(
        f"{pattern} matches no file.",
        "A pattern stands for the files whose names it fits: * for any text, ? for one sign.",
        "Check the address."
        if is_address(pattern)
        else f"Look there: ls {os.path.dirname(pattern) or '.'}",
    )


def _sorted(files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(files, key=natural))


def _in_folder(path: Path, names: list[str]) -> tuple[Path, ...]:
    from retrieval.formats import refused

    if "dataset_dict.json" in names:
        return _splits_of_hugging_face(path)
    if "state.json" in names:
        return _hugging_face(path)
    shards = embedding_files(names)
    if error := refused.explain_folder(path, names, shards):
        raise error
    formats = sorted({_inner_suffix(name) for name in shards})
    if len(formats) > 1:
        raise DmlError(
            f"{path} holds files of several formats: {', '.join(formats)}.",
            "The files of a set have one format.",
            f"Choose some by a pattern: '{path}/*{formats[0]}'",
        )
    return _sorted(path / name for name in shards)


def embedding_files(names: Iterable[str]) -> list[str]:
    """The names, of those in a folder, that have the suffix of an embedding format."""
    suffixes = {s for format in FORMATS if not format.labels_only for s in format.suffixes}
    shown = [name for name in names if not name.startswith((".", "_"))]
    return [name for name in shown if os.path.splitext(name)[1].lower() in suffixes]


def _inner_suffix(name: str) -> str:
    """`.npy` of both x.npy and x.npy.gz."""
    suffixes = Path(name).suffixes
    compressed = suffixes[-1].lower() in COMPRESSED and len(suffixes) > 1
    return suffixes[-2 if compressed else -1].lower()


def _hugging_face(path: Path) -> tuple[Path, ...]:
    """The Arrow files of a folder that `save_to_disk` of Hugging Face's datasets wrote, in order.

    The rows of a filtered data set, which old versions keep in a file of their own, are refused.
    """
    state = _json(path / "state.json")
    listed = state.get("_data_files")
    listed = listed if isinstance(listed, list) else []
    names = [entry.get("filename") for entry in listed if isinstance(entry, dict)]
    good = [name for name in names if isinstance(name, str) and name == os.path.basename(name)]
    if not good or len(good) != len(listed):
        raise damaged(f"{path / 'state.json'} does not list the files of a data set.")
    if state.get("_indices_data_files"):
        raise DmlError(
            f"{path} is a selection of rows of a data set.",
            "It was saved by an old version of datasets, which keeps the selection in a file.",
            "Save it again: dataset.flatten_indices().save_to_disk(FOLDER)",
        )
    return tuple(path / name for name in good)


def _splits_of_hugging_face(path: Path) -> tuple[Path, ...]:
    listed = _json(path / "dataset_dict.json").get("splits")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    known = [name for name in names if name in SPELLINGS and (path / name).is_dir()]
    if not known:
        raise DmlError(
            f"{path} is a data set with the splits {', '.join(names) or '(none)'}.",
            f"Of these, {', '.join(sorted(SPELLINGS))} are known.",
            f"Give one of its folders: dmltool eval {path / names[0]}"
            if names
            else "Save it again: dataset.save_to_disk(FOLDER)",
        )
    return tuple(file for name in known for file in _hugging_face(path / name))


def _json(path: Path) -> dict:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LISTING))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(f"{path} cannot be read.", f"{error}.") from error
    if not isinstance(found, dict):
        raise damaged(f"{path} holds no JSON object.")
    return found


class Sources:
    """The input files of a command, as they were when it began; a missing one is an error."""

    def __init__(
        self,
        *names: str | None,
        labels: Sequence[str | None] = (),
        train: bool = True,
        progress: StageProgress | None = None,
        whole: bool = False,
    ) -> None:
        """train: download files of `train` too; of sets of labels, all files are."""
        self.places: dict[str, Place] = {}
        behind: dict[str, Place] = {}  # x.h5::a and x.h5::b are behind one address
        with addresses_in_errors():
            of_labels = {parse(name).url for name in labels if name and is_address(name)}
            for name in filter(None, (*names, *labels)):
                address = parse(name) if is_address(name) else None
                if address and address.url in behind:
                    self.places[name] = replace(behind[address.url], key=address.key)
                    continue
                all_files = train or (address and address.url in of_labels)
                with leaving_out_train(not all_files):
                    self.places[name] = locate(name, progress, whole)
                if address:
                    behind[address.url] = self.places[name]
        self.files = [file for place in self.places.values() for file in place.files]
        self.files += [place.labels for place in self.places.values() if place.labels]
        for path in self.files:
            if not path.exists():
                find_format(path)  # raises, before anything else is found wrong
        self.seen = [self._look(path) for path in self.files]

    def check_unchanged(self) -> None:
        for path, before in zip(self.files, self.seen, strict=True):
            if self._look(path) != before:
                raise DmlError(
                    f"{shown(str(path))} was changed while it was read.",
                    "Scores of half-old, half-new data would be wrong.",
                    "Run the command again once the file is complete.",
                )

    @staticmethod
    def _look(path: Path) -> tuple[int, int | str] | None:
        if not path.exists():
            return None
        if copy := ranges.find(path):
            return copy.state()
        inside = path.rglob("*") if path.is_dir() else ()
        times = [file.stat().st_mtime_ns for file in (path, *inside)]
        return file_size(path), max(times)
