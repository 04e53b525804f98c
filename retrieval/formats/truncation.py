"""Name the file that was cut short while it was mapped into memory.

Reading a page that a file no longer has is a bus error, which ends a process without a word. A
handler of Python's own cannot help: it runs after the instruction that fails, which never ends.
This one is called by the system itself, on the spot; it says what happened and ends the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_sizes: dict[Path, int] = {}  # of mapped files, as they were when they were opened
_wanted = False
_handler: object = None  # kept, or it would be collected and the system call into nothing


def enable() -> None:
    """For programs; a library leaves the signals of its process alone."""
    global _wanted
    _wanted = True


def watch(path: Path, size: int) -> None:
    """A file of this size is mapped from now on."""
    global _handler
    _sizes[path.absolute()] = size
    if _wanted and _handler is None and hasattr(signal, "SIGBUS"):
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
        install = ctypes.CDLL(None).signal
        install.argtypes, install.restype = [ctypes.c_int, kind], ctypes.c_void_p
        _handler = kind(_tell)
        install(signal.SIGBUS, _handler)


def _tell(_: int) -> None:
    # Straight to the descriptor: another thread may hold the lock of sys.stderr.
    try:
        os.write(2, _message().encode("utf-8", "surrogateescape"))
    finally:
        os._exit(1)


def _message() -> str:
    cut = [p for p, size in _sizes.items() if p.exists() and os.path.getsize(p) < size]
    what = f"{cut[0]} was cut short while it was read." if cut else "A file could not be read on."
    return (
        f"\nError: {what}\n"
        "  Another program wrote to the file in place, or its disk is at fault.\n"
        "  Fix: Run the command again once the file is complete.\n"
    )
