"""Find the files that a name stands for: a file, a run folder, a pattern, shards, an address."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from retrieval.embeddings import leaving_out_train, renamed
from retrieval.errors import DmlError
from retrieval.formats import find_format, store_format
from retrieval.formats.arrays import copies, file_size
from retrieval.resources import StageProgress


@dataclass(frozen=True)
class Place:
    """What a name on the command line stands for."""

    name: Path | str
    """As people see it."""
    files: tuple[Path, ...]
    """In natural order. One file, which need not exist, or the shards of one set."""
    labels: Path | None = None
    """A file of labels that belongs to the others."""
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.name}::{self.key}" if self.key else str(self.name)

    @property
    def is_set(self) -> bool:
        return self.files != (self.name,)


def is_address(name: str | Path | None) -> bool:
    """Whether a name is an address, of any kind."""
    if ":/" not in str(name):  # the modules for addresses are not loaded for the name of a file
        return False
    from retrieval.remote import address

    return address.is_address(str(name))


def addresses_in_errors(*names: str | Path | None) -> AbstractContextManager[None]:
    """Inside the block, errors and notes name addresses, without secrets, and not their copies."""
    if not any(map(is_address, names)):
        return nullcontext()
    from retrieval.remote.cache import shown

    return renamed(shown)


def locate(source: str | Path, progress: StageProgress | None = None, whole: bool = False) -> Place:
    """`file.h5::key` -> the file and the key; for a run folder, the embeddings in it.

    Files behind an address are downloaded, unless copies of them are in the cache. Those that
    `load` can read in parts get copies with holes, unless they are wanted whole. Inside
    `leaving_out_train`, those of `train` are passed over.
    """
    name, key = _without_key(source)
    if is_address(name):
        from retrieval.remote import address, locating

        return Place(*locating.fetch(address.parse(source), whole, progress), key)
    path = Path(name)
    if path.is_dir():
        from retrieval.folders import RUN, choose

        if (path / RUN).is_file():
            return Place(path / RUN, (path / RUN,), None, key)
        if not store_format(path):
            names = [each for each in os.listdir(path) if each != RUN]
            return Place(path, *choose(path, names), key)
    if glob.has_magic(name) and not path.exists():
        return Place(path, _matches(path), None, key)
    return Place(path, (path,), None, key)


def _without_key(source: str | Path) -> tuple[str, str | None]:
    """`file.h5::key` -> the name of the file, and the key."""
    text, key = str(source), ""
    if is_address(text):
        from retrieval.remote import address

        parsed = address.parse(text)
        return parsed.url, parsed.key
    if not text.partition("::")[0]:
        raise DmlError(
            "The name of a file is empty.",
            "A variable of the shell may not be set.",
            "Give the name of a file: dmltool eval embeddings.h5",
        )
    if "::" in text and not os.path.exists(text):
        text, _, key = text.rpartition("::")
    return text, key or None


def _matches(pattern: Path) -> tuple[Path, ...]:
    from retrieval.folders import in_natural_order, no_match

    found = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
    if files := [file for file in found if not file.is_dir() or store_format(file)]:
        return in_natural_order(files)
    raise no_match(str(pattern), f"Look there: ls {os.path.dirname(pattern) or '.'}")


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
        found: dict[str, Place] = {}
        with addresses_in_errors(*names, *labels):
            for name in filter(None, (*labels, *names)):
                bare, key = _without_key(name)  # x.h5::a and x.h5::b are downloaded once
                with leaving_out_train(not train and name not in labels):
                    place = found.get(bare) or locate(name, progress, whole)
                found[bare] = place
                found[name] = replace(place, key=key)
        self.places = {name: found[name] for name in (*names, *labels) if name}
        self.files = [file for place in self.places.values() for file in place.files]
        self.files += [place.labels for place in self.places.values() if place.labels]
        for path in self.files:
            if not path.exists():
                find_format(path)  # raises, before anything else is found wrong
        self.seen = [self._look(path) for path in self.files]

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """If reading fails because a file was changed meanwhile, raise an error that says so."""
        try:
            yield
        except DmlError:
            self.check_unchanged()
            raise

    def check_unchanged(self) -> None:
        for path, before in zip(self.files, self.seen, strict=True):
            if self._look(path) != before:
                with addresses_in_errors(*self.places):
                    raise DmlError(
                        f"{path} was changed while it was read.",
                        "Scores of half-old, half-new data would be wrong.",
                        "Run the command again once the file is complete.",
                    )

    @staticmethod
    def _look(path: Path) -> tuple[int, int | str] | None:
        if not path.exists():
            return None
        if copy := copies.get(path):
            return copy.state()
        inside = path.rglob("*") if path.is_dir() else ()
        try:
            times = [file.stat().st_mtime_ns for file in (path, *inside)]
        except FileNotFoundError:  # a folder that is being written
            return None
        return file_size(path), max(times)
