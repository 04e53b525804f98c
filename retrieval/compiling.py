"""Compile loops to machine code with numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

SUMS = {"reassoc", "contract", "nsz"}
"""Sums may be added up in any order, so they use vector registers; NaN still compares false."""


def compiled(
    function: Callable[..., Any] | None = None, *, fastmath: bool | set[str] = SUMS
) -> Any:
    """Compile a function that releases the GIL; cache the code on disk where that is allowed."""
    if function is None:
        return lambda f: compiled(f, fastmath=fastmath)
    try:
        return njit(nogil=True, cache=True, fastmath=fastmath)(function)
    except RuntimeError:  # no folder can be written: compiled anew in every process
        return njit(nogil=True, fastmath=fastmath)(function)
