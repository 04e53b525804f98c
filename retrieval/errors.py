"""DmlError: what happened, why, and what to do about it; commands to show; lists.

Imports nothing of ours.
"""

import errno
import glob
import shlex
from collections.abc import Iterable


class DmlError(Exception):
    """What happened, why, and what to do about it. `cli.py` alone renders it."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system answers if a disk is full
REMEDIES = {
    FULL: "Make room there, or give another place.",
    (errno.EACCES, errno.EPERM, errno.EROFS): "Change its permissions, or give another place.",
    (errno.EMFILE, errno.ENFILE): "Allow more open files, then run it again: ulimit -n 65536",
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG): "Give another path.",
}


def remedy(error: OSError) -> str:
    """What to do about an error of the system."""
    found = (fix for numbers, fix in REMEDIES.items() if error.errno in numbers)
    return next(found, "Check the disk or the connection, then run the command again.")


def damaged(what: str, why: str = "The file is damaged.") -> DmlError:
    """The error for a file that is cut short, or holds what its format does not allow."""
    return DmlError(what, why, "Copy or write the file again.")


def listed(
    items: Iterable[object], limit: int = 5, between: str = ", ", count: int | None = None
) -> str:
    """`a, b, c and 7 more`.

    between: what parts the items, such as a line break; count: how many there are, if `items` are
    only the first of them.
    """
    texts = list(map(str, items))
    count = len(texts) if count is None else count
    more = f"and {count - limit:,} more"
    if count <= limit:
        return between.join(texts)
    return between.join(texts[:limit]) + (between if "\n" in between else " ") + more


def command(*words: object) -> str:
    """A command of dmltool that can be copied into a shell."""
    return shlex.join(["dmltool", *map(str, words)])


def pattern(folder: object, suffix: str) -> str:
    """The pattern of the files of a folder that have a suffix, as it is typed into a shell."""
    return shlex.quote(f"{glob.escape(str(folder))}/*{suffix}")


def install(extra: str = "") -> str:
    """The line that installs dmltool, or one of the extras of pyproject.toml as well.

    dmltool is installed from its repository, not by its name: a package index may have something
    else under that name.
    """
    line = "pip install -c constraints.txt " + (f'".[{extra}]"' if extra else ".")
    if extra == "cpu":
        line += ', or ".[gpu]" where there is an NVIDIA GPU'
    return f"In the folder of dmltool's repository: {line}"
