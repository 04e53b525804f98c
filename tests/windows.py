"""Let renaming and removing fail as on Windows: for files that this process has open or mapped."""

import os
import shutil
import sys
from pathlib import Path

NAMES = ("rename", "replace", "unlink", "remove")


def refuse_open_files(monkeypatch):
    """Like Windows, refuse to rename or remove what is open, and lock nothing."""
    for name in NAMES:
        monkeypatch.setattr(os, name, _refusing(getattr(os, name)))
    monkeypatch.setattr(shutil, "rmtree", _refusing(shutil.rmtree))
    monkeypatch.setattr(sys, "platform", "win32")


def _refusing(function):
    def call(*paths, **options):
        for path in paths if options.get("dir_fd") is None else ():
            if isinstance(path, str | os.PathLike) and (used := _used(Path(path).absolute())):
                raise PermissionError(13, f"used by this process: {used}", str(path))
        return function(*paths, **options)

    return call


def _used(path):
    """The open or mapped file that is at this path or below it."""
    here = Path("/proc/self")
    for link in (here / "fd").iterdir():
        try:
            open_file = Path(os.readlink(link))
        except FileNotFoundError:  # closed by another thread, or by the listing of the folder
            continue
        if open_file == path or (path in open_file.parents and not open_file.is_dir()):
            return open_file
    for line in (here / "maps").read_text().splitlines():
        mapped = Path(line.split(maxsplit=5)[-1])
        if mapped == path or path in mapped.parents:
            return mapped
    return None
