"""Collect remarks about a file while it is read, such as its encoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)


def note(text: str) -> None:
    """Add a remark to those that `collected` gathers; without it, nobody listens."""
    notes = _notes.get()
    if notes is not None and text not in notes:
        notes.append(text)


@contextmanager
def collected() -> Iterator[list[str]]:
    """The list of remarks made inside the block."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)
