"""Keep resized images in memory or in a file, so that they are decoded only once.

The file: a header of 64 bytes (magic, version, N, bytes of pixels, bytes of notes), the pixels of
all images one after another, N pairs of int32 (height, width), and the unreadable images as JSON.
An unreadable image has no pixels and the shape 0 x 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import PIL

from retrieval.errors import DmlError
from retrieval.files import cache_folder, remove_leftovers, whole_file
from retrieval.number_format import size
from retrieval.resources import Progress, available_memory, processors, results_of
from trainer.config import Input
from trainer.data.datasets.records import DataSet
from trainer.data.images import check_images, told
from trainer.data.transforms import resized, resized_size

VERSION = 1
_HEADER = struct.Struct("<16sIIQQQ16x")
_MAGIC = b"dmltool images"
_SAMPLE = 256  # the size of all images is estimated after every so many
_SURELY = 0.8  # refuse only if this share of the estimate does not fit

Bad = list[tuple[int, str]]  # (row, reason), as of images.check_images


@dataclass(frozen=True, eq=False)
class Store:
    """N images in one buffer, which worker processes share."""

    pixels: np.ndarray  # (bytes,) uint8
    shapes: np.ndarray  # (N, 2) int32, height and width
    starts: np.ndarray  # (N,) int64
    file: Path | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def image(self, row: int) -> np.ndarray:
        """One image (H, W, 3), as a view."""
        height, width = self.shapes[row].tolist()
        start = self.starts[row]
        return self.pixels[start : start + height * width * 3].reshape(height, width, 3)

    def images(self, rows: np.ndarray) -> np.ndarray:
        """Images (n, H, W, 3) as a copy; all images must have one shape."""
        height, width = self.shapes[0].tolist()
        size = height * width * 3
        return self.pixels.reshape(-1, height, width, 3)[self.starts[rows] // size]

    @cached_property
    def uniform(self) -> bool:
        """Whether all images have one shape."""
        return len(self) > 0 and bool((self.shapes == self.shapes[0]).all())

    def take(self, rows: np.ndarray) -> Store:
        """These images only, in this order."""
        return replace(self, shapes=self.shapes[rows], starts=self.starts[rows])

    def __getstate__(self) -> dict:
        """Leave out the pixels of a mapped file: the receiving process maps it again."""
        return self.__dict__ | ({} if self.file is None else {"pixels": len(self.pixels)})

    def __setstate__(self, state: dict) -> None:
        if state["file"] is not None:
            state["pixels"] = _mapped(state["file"], state["pixels"])
        self.__dict__.update(state)


def in_memory(data: DataSet, spec: Input, progress: Progress | None = None) -> tuple[Store, Bad]:
    """Read and resize all images into memory; DmlError as soon as they will not fit."""
    pixels, images = bytearray(), _read_all(data, spec, progress)
    what = f"The resized images of {data.name} do not fit into memory."
    full = partial(DmlError, what, fix="Keep them in a file: --cache disk")
    shapes, bad = _collect(images, len(data), pixels.extend, available_memory, full)
    return _store(np.frombuffer(pixels, np.uint8), shapes), bad


def on_disk(data: DataSet, spec: Input, progress: Progress | None = None) -> tuple[Store, Bad]:
    """Open the file that an earlier run has written, or write a new one."""
    path = cache_folder() / f"{fingerprint(data, spec)}.images"
    found = _opened(path, len(data))
    if found is None or not _still_bad(data, spec, found[1]):
        _write(path, _read_all(data, spec, progress), len(data))
        found = _opened(path, len(data))
        assert found is not None
    elif progress is not None:
        progress(len(data), len(data))
    return found


def _write(path: Path, images: Iterator[np.ndarray | str], N: int) -> None:
    free, full = lambda: shutil.disk_usage(path.parent).free, partial(_no_room, path.parent)
    with _new_file(path) as file:
        file.write(bytes(_HEADER.size))
        shapes, bad = _collect(images, N, file.write, free, full)
        used, notes = file.tell() - _HEADER.size, json.dumps(bad).encode()
        file.write(shapes.tobytes() + notes)
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, VERSION, 0, N, used, len(notes)))


def _collect(
    images: Iterator[np.ndarray | str],
    N: int,
    add: Callable[[memoryview], object],
    free: Callable[[], int],
    full: Callable[[str], DmlError],
) -> tuple[np.ndarray, Bad]:
    """Add the pixels of N images; return their shapes (N, 2), and the images that are bad.

    free: the bytes that are left. full: the error if the images will surely not fit.
    """
    shapes, bad, used = np.zeros((N, 2), "<i4"), [], 0
    for row, image in enumerate(images):
        if isinstance(image, str):
            bad.append((row, image))
            continue
        add(image.reshape(-1).data)
        used += image.size
        shapes[row] = image.shape[:2]
        if (row + 1) % _SAMPLE == 0:
            left, room = used * (N / (row + 1) - 1), free()
            if _SURELY * left > room:
                needed, there = (size(used + more) for more in (left, room))
                raise full(f"They take about {needed}; {there} are free.")
    return shapes, bad


def _opened(path: Path, N: int) -> tuple[Store, Bad] | None:
    """The images of a file; None if there is no such file, or if it is not complete."""
    try:
        with open(path, "rb") as file:
            magic, version, _, count, used, notes = _HEADER.unpack(file.read(_HEADER.size))
            size = _HEADER.size + used + 8 * count + notes
            whole = os.fstat(file.fileno()).st_size == size
            if (magic.rstrip(b"\0"), version, count) != (_MAGIC, VERSION, N) or not whole:
                return None
            file.seek(_HEADER.size + used)
            shapes = np.frombuffer(file.read(8 * count), "<i4").reshape(count, 2)
            bad = [(row, why) for row, why in json.loads(file.read(notes))]
    except (OSError, struct.error, ValueError, TypeError):
        return None
    if 3 * shapes.prod(axis=1, dtype=np.int64).sum() != used:
        return None
    return _store(_mapped(path, used), shapes, path), bad


def _mapped(path: Path, used: int) -> np.ndarray:
    if not used:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r", _HEADER.size, (used,)))  # views cost less


def _store(pixels: np.ndarray, shapes: np.ndarray, file: Path | None = None) -> Store:
    sizes = 3 * shapes.prod(axis=1, dtype=np.int64)
    pixels.flags.writeable = False
    return Store(pixels, shapes, np.cumsum(sizes) - sizes, file)


def _read_all(data: DataSet, spec: Input, progress: Progress | None) -> Iterator[np.ndarray | str]:
    """Each image resized, or the reason why it cannot be read, in order."""

    def read(row: int) -> np.ndarray | str:
        try:
            return resized(data.image(row, spec.short_side), spec)
        except DmlError as error:
            return error.why or error.what

    rows = range(len(data))
    # Decoders of files run outside Python's lock; other readers need not bear threads at all.
    images = map(read, rows) if data.files() is None else results_of(read, rows, processors())
    return told(images, len(data), progress)


# The folder of the files


def fingerprint(data: DataSet, spec: Input) -> str:
    """The name of a cache file: it changes with the images and with how they are resized."""
    digest = hashlib.sha256()
    resize = (spec.resize, spec.keep_ratio, spec.interpolation, spec.draft)
    root = None if data.root is None else str(data.root.resolve())
    options = json.dumps(dict(data.options), default=str, sort_keys=True)
    head = (VERSION, PIL.__version__, data.name, root, repr(data.reader), options, resize)
    digest.update(repr(head).encode())
    states: dict[str, str] = {}
    files: Sequence[str] = data.files() or [
        f"{data.root}/{path.rpartition('#')[0]}" for path in data.paths
    ]
    for path, file in zip(data.paths, files, strict=True):
        if file not in states:
            states[file] = _state(file) if data.root is not None else ""
        digest.update(f"{path}\0{states[file]}\n".encode("utf-8", "surrogateescape"))
    return f"{data.name}-{digest.hexdigest()[:24]}"


def _state(file: str) -> str:
    try:
        status = os.stat(file)
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file of the cache; what killed runs have left in the cache is removed first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        with whole_file(path) as file:
            yield file
    except (OSError, DmlError) as error:
        cause = error.__cause__ if isinstance(error, DmlError) else error  # that of whole_file
        if not isinstance(cause, OSError):
            raise
        raise _no_room(path.parent, f"{cause.strerror or cause}.") from error


def _no_room(folder: Path, why: str) -> DmlError:
    return DmlError(
        f"The resized images cannot be kept in {folder}.",
        why,
        "Make room, choose another disk with XDG_CACHE_HOME, or decode every time: --cache none",
    )


# Checks of images that are not kept


def check(data: DataSet, spec: Input, progress: Progress | None = None) -> Bad:
    """List images that cannot be read or resized; the result of an earlier check is reused."""
    path = cache_folder() / f"{fingerprint(data, spec)}.checked"
    with suppress(OSError, ValueError, TypeError):
        bad = [(int(row), str(why)) for row, why in json.loads(path.read_text())]
        if _still_bad(data, spec, bad):
            return bad
    bad = _check(data.files() or (), spec, progress)
    # So that the next run, or a resumed one, starts at once. A read-only disk does no harm.
    with suppress(DmlError), _new_file(path) as file:
        file.write(json.dumps(bad).encode())
    return bad


def _still_bad(data: DataSet, spec: Input, bad: Bad) -> bool:
    """Whether all of these are still bad; new permissions or a mounted disk change no file date."""
    files = data.files()
    if files is None:
        return True
    return len(_check([files[row] for row, _ in bad], spec)) == len(bad)


def _check(files: Sequence[str], spec: Input, progress: Progress | None = None) -> Bad:
    fits = partial(resized_size, spec=spec)
    return check_images(files, progress=progress, short_side=spec.short_side, fits=fits)
