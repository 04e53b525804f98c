"""The names of splits, how files, folders and tables spell them, and which are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SPLITS = ("train", "val", "test", "query", "gallery")
HELD_OUT = ("test", "query", "gallery")
"""What scores are computed on: one test set, or queries and a gallery."""
SPELLINGS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("query", "queries", "probe"), "query"),
    "gallery": "gallery",
}

# No parameter: it would have to pass through the reader of every format.
_no_train: ContextVar[bool] = ContextVar("no_train", default=False)


@contextmanager
def leaving_out_train(on: bool = True) -> Iterator[None]:
    """Inside the block, the split `train` is not read where there are others to score."""
    token = _no_train.set(on)
    try:
        yield
    finally:
        _no_train.reset(token)


def to_read(splits: Collection[str]) -> list[str]:
    """These splits, without `train` where that is left out and there are others to score."""
    scored = "test" in splits or {"query", "gallery"} <= set(splits)
    return [split for split in splits if split != "train" or not (_no_train.get() and scored)]
