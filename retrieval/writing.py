"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from retrieval.errors import DmlError


def check_target(path: str | Path, force: bool, inputs: Sequence[Path] = ()) -> Path:
    """The path as one that can be written; called before long work, so that none is lost.

    What is read is never overwritten, not even by force.
    """
    path = Path(path).resolve()  # through links: the file they lead to is replaced, not they
    if any(source.exists() and path.exists() and path.samefile(source) for source in inputs):
        raise DmlError(
            f"{path} is read and written at once.",
            "The result would replace the data it was computed from.",
            "Choose another name for the output.",
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DmlError(
            f"{path} is not a regular file.",
            "It would be replaced by one.",
            "Print to it instead: --json > FILE",
        )
    if path.is_dir():
        raise DmlError(f"{path} is a folder.", "A file is to be written there.", "Name a file.")
    if path.exists() and not force:
        raise DmlError(
            f"{path} exists already.", "It would be overwritten.", "Choose another name or --force."
        )
    if not path.parent.is_dir():
        raise DmlError(
            f"{path} cannot be written.",
            f"The folder {path.parent} does not exist.",
            f"mkdir -p {path.parent}",
        )
    if not os.access(path.parent, os.W_OK):
        raise DmlError(
            f"{path} cannot be written.",
            f"The folder {path.parent} is read-only.",
            "Choose another folder.",
        )
    return path


def write_text(path: Path, text: str, force: bool = False) -> None:
    with whole_file(path, force) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: Path, force: bool = True) -> Iterator[BinaryIO]:
    """Written under a temporary name, then renamed: a reader never meets half a file."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            if force:
                os.replace(temporary, path)
            else:  # fails if another run has been faster
                os.link(temporary, path)
                os.unlink(temporary)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise DmlError(
            f"{path} cannot be written.", f"{error.strerror}.", "Choose another place or name."
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
