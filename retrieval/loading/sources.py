"""Find the files that a name stands for: a file, a run folder, a pattern, shards, an address."""

from __future__ import annotations

import glob
import os
import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from retrieval.embeddings import SPELLINGS, leaving_out_train, renamed
from retrieval.errors import DmlError
from retrieval.files import nearest_folder
from retrieval.formats import store_format
from retrieval.resources import StageProgress
from retrieval.run_files import EMBEDDINGS


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
    folder: Path | None = None
    """The folder that was named, if one file in it stands for it."""

    def __str__(self) -> str:
        return f"{self.name}::{self.key}" if self.key else str(self.name)

    @property
    def is_set(self) -> bool:
        return self.files != (self.name,)

    @property
    def is_named(self) -> bool:
        """Whether the name is that of the only file, which may be behind an address."""
        return [file.name for file in self.files] == [os.path.basename(self.name)]


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
    from retrieval.remote.cache import shown, shown_fix

    return renamed(shown, shown_fix)


def locate(
    source: str | Path,
    progress: StageProgress | None = None,
    whole: bool = False,
    labels: bool = False,
) -> Place:
    """`file.h5::key` -> the file and the key; for a run folder, the embeddings in it.

    Files behind an address are downloaded, unless copies of them are in the cache. Those that
    `load` can read in parts get copies with holes, unless they are wanted whole. Inside
    `leaving_out_train`, those of `train` are passed over, unless the key is `train`.
    labels: whether labels are wanted.
    """
    name, key = without_key(source)
    if is_address(name):
        from retrieval.loading import fetching
        from retrieval.remote import address

        wanted = nullcontext() if SPELLINGS.get(key or "") != "train" else leaving_out_train(False)
        with wanted:
            return Place(*fetching.fetch(address.parse(source), whole, progress, labels), key)
    path = Path(name)
    if path.is_dir():
        from retrieval.loading.folders import choose

        names = os.listdir(path)  # first: an error then names the folder, and no file in it
        if (path / EMBEDDINGS).is_file():
            return Place(path / EMBEDDINGS, (path / EMBEDDINGS,), None, key, folder=path)
        if not store_format(path):
            names = [each for each in names if each != EMBEDDINGS]
            return Place(path, *choose(path, names, labels), key)
    if glob.has_magic(name) and not path.exists():
        return Place(path, _matches(path), None, key)
    return Place(path, (path,), None, key)


def without_key(source: str | Path) -> tuple[str, str | None]:
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
    from retrieval.loading.folders import in_natural_order, no_match

    found: dict[Path, None] = {}  # a name comes several times where a pattern has ** twice
    folders: set[Path] = set()
    for file in map(Path, glob.iglob(str(pattern), recursive=True)):
        if file.parent not in folders:
            _refuse_loop(pattern, file.parent)
            folders.add(file.parent)
        found[file] = None
    if files := [file for file in found if not file.is_dir() or store_format(file)]:
        return in_natural_order(files)
    raise no_match(str(pattern), f"Look there: ls {shlex.quote(str(nearest_folder(pattern)))}")


def _refuse_loop(pattern: Path, folder: Path) -> None:
    """Raise for a folder that is also one above it: glob would follow such links on and on."""
    first = len(Path(str(pattern).partition("**")[0]).parts)  # that ** stands for
    above = [Path(*folder.parts[:n]) for n in range(first, len(folder.parts))]
    if os.path.realpath(folder) in map(os.path.realpath, above):
        raise DmlError(
            f"{pattern} leads in a circle.",
            f"{folder} is a link to a folder above it.",
            "Remove the link, or give a pattern that does not lead through it.",
        )
