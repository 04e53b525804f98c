"""The IDX files of MNIST and its family (Fashion-MNIST, KMNIST, EMNIST), gzipped or not.

An image is addressed as `file#number`. Train and test have the same classes: this data set shows
how a loss trains, not how a network does on new classes.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from retrieval.errors import DmlError, listed
from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet, build

TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
LARGEST = 1 << 32  # bytes once unpacked; EMNIST, the largest of the family, has 0.6e9


@dataclass(frozen=True)
class IdxReader:
    """Images inside IDX files; each process reads a file once."""

    root: str

    def __call__(self, path: str, short_side: int | None = None) -> np.ndarray:
        file, _, number = path.rpartition("#")
        grey = read_idx(Path(self.root) / file)[int(number)]  # (H, W)
        return np.repeat(grey[..., None], 3, axis=2)


def read(root: Path, *, variant: str = "") -> DataSet:
    """Read *-images-idx3-ubyte with *-labels-idx1-ubyte; variant: a word in the names to read."""
    layout.folder(root)
    rows, classes = [], set()
    for split, images, labels in _pairs(root, variant):
        pixels, numbers = read_idx(images), read_idx(labels)
        if pixels.ndim != 3 or pixels.dtype != np.uint8 or not pixels[0:1].size:
            shape = "x".join(map(str, pixels.shape))
            raise _damaged(images, f"it holds {shape} {pixels.dtype}, not images of grey bytes")
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or len(numbers) != len(pixels):
            raise _damaged(labels, f"it does not hold {len(pixels):,} whole numbers, one an image")
        classes.update(numbers.tolist())
        rows += [
            (f"{images.name}#{row}", str(label), split)
            for row, label in enumerate(numbers.tolist())
        ]
    note = "The classes of test are also trained on: scores do not show new classes."
    both = len({split for _, _, split in rows}) > 1
    names = [str(label) for label in sorted(classes)]
    return build("idx", root, rows, IdxReader(str(root)), [note] if both else [], names)


def _pairs(root: Path, variant: str) -> Iterator[tuple[str, Path, Path]]:
    """(split, images file, labels file) for train and test, whichever are there."""
    files = sorted(p for p in root.iterdir() if "idx3-ubyte" in p.name and variant in p.name)
    images: dict[str, list[Path]] = {"train": [], "test": []}
    for file in files:
        split = "train" if "train" in file.name else "test"
        # The unpacked file sorts before the packed one, and is read faster.
        if _plain(file) not in map(_plain, images[split]):
            images[split].append(file)
    if not files or any(len(found) > 1 for found in images.values()):
        several = f"Several sets are here: {listed(p.name for p in files)}." if files else ""
        raise DmlError(
            f"{root} does not hold one set of IDX files.",
            several or "There is no file like train-images-idx3-ubyte or the same with .gz.",
            "Choose by a word of the names: --set data.options.variant=WORD (train only); or put "
            "each set into a folder of its own."
            if files
            else "Name the folder that has them: --data FOLDER (embed: idx:FOLDER)",
        )
    for split, found in images.items():
        for file in found:
            name = _plain(file).replace("images", "labels").replace("idx3", "idx1")
            labels = next((p for p in (root / name, root / f"{name}.gz") if p.is_file()), None)
            if labels is None:
                raise DmlError(
                    f"{file} has no labels.",
                    f"There is no {name} beside it.",
                    "Put that file there, or name the folder that has both.",
                )
            yield split, file, labels


def _plain(path: Path) -> str:
    return path.name.removesuffix(".gz")


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file, read-only; kept in memory, or mapped if it is not packed."""
    try:
        status = path.stat()
    except OSError as error:
        raise layout.unreadable(path, error) from error
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> np.ndarray:
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            dtype, shape = _header(path, file)
            start, wanted = file.tell(), math.prod(shape) * dtype.itemsize
            content = file.read(wanted + 1) if packed else b""
        held = len(content) if packed else size - start
        if held != wanted:
            many = "more" if held > wanted else f"{held:,}"
            raise _damaged(path, f"it should hold {wanted:,} bytes of data, it has {many}")
        if packed:
            return np.frombuffer(content, dtype).reshape(shape)
        return np.memmap(path, dtype, "r", start, shape)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise _damaged(path, str(error)) from error


def _header(path: Path, file: BinaryIO | gzip.GzipFile) -> tuple[np.dtype, tuple[int, ...]]:
    """Two zero bytes, the type, the number of dimensions, then each as a big-endian uint32."""
    zeros, code, dimensions = struct.unpack(">HBB", file.read(4))
    if zeros or code not in TYPES or not 1 <= dimensions <= 4:
        raise _damaged(path, "its first bytes are not those of an IDX file")
    shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    dtype = np.dtype(TYPES[code])
    if math.prod(shape) * dtype.itemsize > LARGEST:
        raise _damaged(path, f"it claims {'x'.join(map(str, shape))} numbers, which is too much")
    return dtype, shape


def _damaged(path: Path, why: str) -> DmlError:
    return DmlError(f"{path} cannot be used: {why}.", "", "Get the file from its source again.")
