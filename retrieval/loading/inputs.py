"""The input files of a command: found once, read, and the same at the end as at the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from retrieval.distributed.world import ALONE, World
from retrieval.embeddings import SPELLINGS, Embeddings, leaving_out_train, setting
from retrieval.errors import DmlError
from retrieval.formats import find_format
from retrieval.formats.arrays import OpenFile, Sharing, copies, file_size, machine, sharing
from retrieval.loading.load import load
from retrieval.loading.sources import Place, addresses_in_errors, locate, without_key
from retrieval.resources import StageProgress


class Inputs:
    """The input files of a command, as they were when it began; a missing one is an error."""

    def __init__(
        self,
        *names: str | None,
        labels: Sequence[str | None] = (),
        train: bool = True,
        progress: StageProgress | None = None,
        whole: bool = False,
        world: World = ALONE,
    ) -> None:
        """Find the files, and note their sizes and times.

        train: whether to download the files of `train` too; all files of a set of labels are
        downloaded.
        world: the processes that read the same files; all of them call `load`.
        """
        self.train, self.progress, self.world = train, progress, world
        found: dict[str, Place] = {}
        located: dict[tuple[str, bool], Place] = {}  # x.h5::a and x.h5::b are downloaded once
        given = [name for name in (*labels, *names) if name is not None]
        with addresses_in_errors(*given):
            for name in given:
                bare, key = without_key(name)
                of_train = SPELLINGS.get(key or "") == "train"
                with leaving_out_train(not train and name not in labels):
                    place = located.get((bare, of_train)) or locate(
                        name, progress, whole, name in labels
                    )
                located[bare, of_train] = place
                found[name] = replace(place, key=key)
        self.places = {name: found[name] for name in (*names, *labels) if name is not None}
        self.files = [file for place in self.places.values() for file in place.files]
        self.files += [place.labels for place in self.places.values() if place.labels]
        for path in self.files:
            if not path.exists():
                find_format(path)  # raises, before anything else is found wrong
        self.seen = [self._look(path) for path in self.files]

    def load(self, name: str, **beside: str | None) -> Embeddings:
        """Read one of the files; beside: labels, gallery and gallery_labels of `load`."""
        with self.being_read(), self._one_copy():
            return load(
                name,
                train=self.train,
                progress=self.progress,
                places=self.places,
                world=self.world,
                **beside,
            )

    @contextmanager
    def _one_copy(self) -> Iterator[None]:
        """Inside the block, only the first process of each machine copies the vectors of sets.

        The others wait for it and map its copies, if they read the same files. Each process calls
        `gather` once, also one that reads no set: its files may be others than those of other
        machines.
        """
        if self.world.size == 1:
            yield
            return
        from retrieval.distributed.processes import gather

        # Files that differ may have vectors of the same shape, with other labels beside them.
        same, first = (machine(), self.seen), self.world.local_rank == 0
        waits = not first and any(place.is_set for place in self.places.values())
        told: list[tuple[object, list[OpenFile]]] = gather((None, []), self.world) if waits else []
        shared = Sharing(next((files for of, files in told if of == same), []))
        with setting(sharing, shared):
            yield
        if not waits:
            gather((same if first else None, shared.own), self.world)

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
