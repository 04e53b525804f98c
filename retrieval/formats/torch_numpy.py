"""Read NumPy arrays inside `.pt` files without running the code that rebuilds them.

torch.load(weights_only=True) calls only functions that it is given. It is given these, which check
what they get, in the place of NumPy's own: NumPy trusts a pickle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from retrieval.errors import damaged


class Dtype:
    """A dtype, by its short name."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name = name
        self.order: Literal["<", ">", "|", "="] = "="

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

    def plain(self) -> np.dtype | None:
        """The dtype, or None for one that is not taken."""
        if not isinstance(self.name, str) or self.name[:1] not in "biufUSO":
            return None
        if not self.name[1:].isdecimal() or len(self.name) > 9:
            return None
        try:
            return np.dtype(self.name).newbyteorder(self.order)
        except TypeError:
            return None


class Array:
    """An array, from the state of its pickle."""

    def __init__(self, state: object = None) -> None:
        self.state = state

    def __setstate__(self, state: object) -> None:
        self.state = state

    def value(self) -> np.ndarray | list | None:
        """The array, or the values of an array of objects; None for what is not a plain array."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            return None
        _, shape, dtype, fortran, data = self.state
        dtype = dtype.plain() if isinstance(dtype, Dtype) else None
        sizes = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if dtype is None or not sizes:
            return None
        if dtype.hasobject:
            return data if isinstance(data, list) and len(shape) == 1 else None
        if not isinstance(data, bytes) or not dtype.itemsize:
            return None
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise damaged(
                f"A NumPy array of shape {shape} and dtype {dtype} stores {len(data):,} bytes."
            )
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def reconstruct(*_: object) -> Array:
    return Array()


def scalar(dtype: object = None, data: object = None) -> Array:
    return Array((1, (), dtype, False, data))


def unwrapped(value: object) -> object:
    """A NumPy scalar as a Python one; anything else as it is."""
    if isinstance(value, Array) and isinstance(array := value.value(), np.ndarray):
        return array.item() if array.ndim == 0 else value
    return value


class Anything:
    """Stand-in for numpy.ndarray, which pickles name but nothing calls."""


def allowed() -> list[Callable | tuple[Callable, str]]:
    """For torch.serialization.safe_globals: each stand-in, and the name that it replaces."""
    found: list[Callable | tuple[Callable, str]] = [
        (Anything, "numpy.ndarray"),
        (Dtype, "numpy.dtype"),
        (Array, "dmltool.array"),  # built by `reconstruct`; no pickle names it
    ]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        found += [(reconstruct, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    return found
