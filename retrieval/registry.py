"""Tables of losses, data sets, backbones and the like: look up a name, suggest the nearest.

An entry names an object by its dotted path. The object is imported when it is used, so that listing
a table loads nothing heavy. A module's table is extended with `TABLE.add(Entry(...))`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeVar

import click

from retrieval.errors import DmlError


@dataclass(frozen=True)
class Entry:
    """A name, the dotted path of the object behind it, and one line about it."""

    name: str
    path: str
    """`package.module:attribute`, or the path of a module alone."""
    summary: str

    def load(self) -> Any:
        """Import the module and return the object."""
        module, _, attribute = self.path.partition(":")
        found = import_module(module)
        return getattr(found, attribute) if attribute else found


ARGUMENTS = "dmltool.arguments"  # key of the context of click: what was typed
OWN = "DMLTOOL_OWN"  # environment variable: paths of your own code, separated by commas
NAMING = ("--loss", "--log", "--monitor", "--set", "--grid")  # options whose values name code
_own_modules: set[str] = set()  # code outside dmltool that this process was told to use
E = TypeVar("E", bound=Entry)


class Registry(Collection[E]):
    """The entries of one kind, looked up by name.

    kind: what an entry is, for messages, such as "loss".
    option: the option that takes a name, such as "--loss".
    listed: what `dmltool list` calls the entries, such as "losses".
    families: functions that turn the NAME of `prefix:NAME` into an entry, by prefix.
    own: turns `package.module:attribute`, the path of a user's object, into an entry.
    """

    def __init__(
        self,
        kind: str,
        *entries: E,
        option: str = "",
        listed: str = "",
        families: Mapping[str, Callable[[str], E]] | None = None,
        own: Callable[[str], E] | None = None,
    ) -> None:
        self.kind, self.option, self.listed = kind, option, listed
        self.families, self.own = families or {}, own
        self.entries = {entry.name: entry for entry in entries}

    def __iter__(self) -> Iterator[E]:
        return iter(self.entries.values())

    def __contains__(self, entry: object) -> bool:
        return entry in self.entries.values()

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entry: E) -> None:
        """Add an entry, or replace the one of that name."""
        self.entries[entry.name] = entry

    def names(self) -> list[str]:
        """All names, in the order of the table."""
        return list(self.entries)

    def summaries(self) -> dict[str, str]:
        """The summary of each entry by its name."""
        return {entry.name: entry.summary for entry in self}

    def find(self, name: str) -> E:
        """Return the entry of that name; DmlError names the nearest one, or all of them."""
        if name in self.entries:
            return self.entries[name]
        prefix, colon, rest = name.partition(":")
        if colon and prefix in self.families:
            return self.families[prefix](rest)
        if colon and rest and self.own:
            _require_typed(self.kind, name)
            _own_modules.add(prefix)
            return self.own(name)
        also = [f"{prefix}:NAME" for prefix in self.families]
        also += ["package.module:NAME for your own"] if self.own else []
        raise unknown(self.kind, name, self.names(), self.option, also, self.listed)


def _require_typed(kind: str, name: str) -> None:
    """Raise if a command would run code that only a file names, such as a checkpoint."""
    context = click.get_current_context(silent=True)
    if context is None:  # called from Python: the caller names it
        return
    words = context.find_root().meta.get(ARGUMENTS, ())
    allowed = os.environ.get(OWN, "").split(",")
    # Values of these options only: the name of a folder is not chosen by who types it.
    for option, value in [*pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]:
        if option in NAMING:
            allowed += re.split(r"[=,\s\[\]'\"]", value)  # "..." and lists in TOML as well
    if name in allowed:
        return
    raise DmlError(
        f"A file names the {kind} {name}, which is code outside dmltool.",
        "Files never choose which code runs; the command line has to name it.",
        f"If you trust that code, set a variable (commas between several names): {OWN}={name} "
        "dmltool ...",
    )


def own_class(kind: str, entry: Entry, base: type) -> type:
    """The class at the dotted path of an entry of the user's own, derived from `base`.

    Nothing else is returned, because what it finds may be called.
    """
    try:
        found = entry.load()
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise DmlError(
            f"The {kind} {entry.name!r} cannot be imported.",
            f"{error}.",
            "Name a class as package.module:Class; PYTHONPATH=. finds modules of this folder.",
        ) from error
    if not (isinstance(found, type) and base in found.__mro__):
        raise DmlError(
            f"{entry.name!r} is not a {kind}.",
            f"A class derived from {base.__module__}.{base.__name__} is needed.",
            "The page docs/extending.md shows how to write one.",
        )
    return found


def own_code_of(error: Exception) -> str:
    """The module of the user's own code in which an error was raised; empty if in none."""
    from traceback import walk_tb

    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
    return next((name for name in names if name in _own_modules), "")


def unknown(
    kind: str,
    name: str,
    known: Iterable[str],
    option: str = "",
    also: Iterable[str] = (),
    listed: str = "",
) -> DmlError:
    """The error for a name that does not exist: lists the known names, suggests the nearest.

    listed: what `dmltool list` calls the known ones, if it does.
    """
    known = list(known)
    near = nearest(name, known)
    names = ", ".join([*known, *also])
    fix = f"Choose one of these: {option} NAME" if option else "Give one of these names."
    if listed:
        fix += f"\nTo see what each is: dmltool list {listed}"
    if near:
        fix = f"Did you mean {near!r}?" + (f" {option} {near}" if option else "")
    return DmlError(f"There is no {kind} {name!r}.", f"There are: {names}.", fix)


def check_options(of: str, given: Iterable[str], valid: Iterable[str], table: str) -> None:
    """Raise for the first option that does not exist.

    of: who takes the options, such as "The loss 'ce'". table: where they are set, such as
    loss.options.
    """
    valid = list(valid)
    for option in given:
        if option in valid:
            continue
        near = nearest(option, valid)
        raise DmlError(
            f"{of} has no option {option!r}.",
            f"Its options: {', '.join(valid)}." if valid else "It has no options.",
            f"Did you mean {near!r}? --set {table}.{near}=..."
            if near
            else f"Leave out --set {table}.{option}=...",
        )


def nearest(word: str, valid: Iterable[str], cutoff: float = 0.65) -> str:
    """The valid word most like this one, or one that begins with it; empty if none is alike.

    A prefix such as `pml:` that the word has does not count: all names of a family have it.
    """
    prefix = word[: word.rfind(":") + 1].lower()
    by_lower = {name.lower().removeprefix(prefix): name for name in valid}
    given = word.lower().removeprefix(prefix)
    near = difflib.get_close_matches(given, by_lower, 1, cutoff)
    near += [name for name in by_lower if len(given) > 2 and name.startswith(given)]
    return by_lower[near[0]] if near else ""
