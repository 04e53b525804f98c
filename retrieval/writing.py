"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from retrieval.errors import DmlError


def check_target(path: str | Path, force: bool) -> Path:
    """The path as one that can be written; called before long work, so that none is lost."""
    path = Path(path)
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


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name, then renames: a reader never meets half a file."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise DmlError(
            f"{path} cannot be written.", f"{error.strerror}.", "Free space or choose another name."
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
