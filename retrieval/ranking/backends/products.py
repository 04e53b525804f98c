"""Multiply with torch in float32 as IEEE 754 has it, whatever is set: no TF32, no bfloat16."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Precisions(NamedTuple):
    setting: str  # of `torch.set_float32_matmul_precision`
    newer: list[str]


_lock = threading.Lock()
_users: list[_Precisions] = []  # those before the first user


def multiply(queries: Tensor, items: Tensor) -> Tensor:
    """The product (A, B) that ranks are counted from."""
    return torch.matmul(queries, items.T)


@contextmanager
def ieee_products() -> Iterator[None]:
    """Compute products without TF32 inside; of overlapping blocks, the last to end restores it."""
    with _lock:
        _users.append(_users[0] if _users else _precisions())
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        with _lock:
            before = _users.pop()
            if not _users:
                _restore(before)


def _precisions() -> _Precisions:
    """How torch multiplies float32."""
    try:
        setting = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for GPUs or CPUs alone, in the newer way
        setting = ""
    newer = [backend.fp32_precision for backend in _newer()]
    return _Precisions(setting, newer)


def _restore(before: _Precisions) -> None:
    if before.setting:
        torch.set_float32_matmul_precision(before.setting)
    for backend, value in zip(_newer(), before.newer, strict=True):
        if backend.fp32_precision != value:
            backend.fp32_precision = value


def _newer() -> list[Any]:
    """Where torch 2.9 and later keep the precision of GPUs and of CPUs."""
    both = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    return [backend for backend in both if hasattr(backend, "fp32_precision")]
