"""Check settings: dataclasses whose fields say which types and values they take.

The types are those of the annotations; `within`, `one_of` and `accepting` say which values. All
problems are reported together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from retrieval.errors import DmlError
from retrieval.registry import nearest

NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
ABSTRACT = {int: Integral, float: Real}  # numbers of NumPy too


class Fault(NamedTuple):
    """A problem of settings: their dotted keys, and a sentence about them."""

    keys: tuple[str, ...]
    text: str
    fix: str = ""
    """What to do about it, if that can be said."""


class BadSettings(DmlError):
    """All problems of settings, one per line.

    fix: what to do, unless each problem says it.
    """

    def __init__(self, what: str, problems: list[Fault], fix: str) -> None:
        fixes = [problem.fix for problem in problems]
        why = "\n".join(problem.text for problem in problems)
        super().__init__(what, why, "\n".join(fixes) if all(fixes) else fix)
        self.problems = problems


def within(low: float, high: float = math.inf, *, default: object) -> Any:
    """A field for numbers from low to high, or several of them."""
    words = f"a number from {low:g} to {high:g}" if high < math.inf else f"{low:,} or more"
    return accepting(lambda number: low <= number <= high, words, default=default)  # not NaN


def one_of(*choices: Any, default: object) -> Any:
    """A field for one of some values, or several of them."""
    accepted = {"accepts": choices.__contains__, "words": either(choices), "choices": choices}
    return field(default=default, metadata=accepted)


def accepting(accepts: Callable[[Any], object], words: str, *, default: object) -> Any:
    """A field for values, or several of them, that a function accepts; words: what they are."""
    return field(default=default, metadata={"accepts": accepts, "words": words})


def either(choices: tuple[Any, ...]) -> str:
    """("l2", "cos", "both") -> "l2, cos or both"."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class Checked:
    """The base class of settings whose types and values are checked."""

    def problems(self, prefix: str = "") -> Iterator[Fault]:
        """Values that their fields do not take, or else that cannot be used together."""
        found = list(invalid(self, prefix))
        yield from found or self.conflicts()

    def conflicts(self) -> Iterator[Fault]:
        """Values that cannot be used together."""
        yield from ()

    def require_valid(self) -> None:
        """Convert values to the types of their fields; BadSettings names those that are wrong."""
        if found := list(self.problems()):
            wrong = {key for problem in found for key in problem.keys}
            usual = [f"{each.name}={each.default!r}" for each in fields(self) if each.name in wrong]
            fix = f"Leave them out for their defaults, {', '.join(usual)}, or give other values."
            raise BadSettings("These settings cannot be used.", found, fix)
        for name, kind in get_type_hints(type(self)).items():
            object.__setattr__(self, name, converted(getattr(self, name), kind))


def invalid(table: Any, prefix: str = "") -> Iterator[Fault]:
    """Values of a dataclass that its fields do not take: one problem for each field."""
    kinds = get_type_hints(type(table))
    for each in fields(table):
        key, value = f"{prefix}{each.name}", getattr(table, each.name)
        try:
            value = converted(value, kinds[each.name])
        except ValueError as error:
            yield Fault((key,), f"{key} = {shortened(value)} is not {error}.")
            continue
        several = value if isinstance(value, tuple) else () if value is None else (value,)
        for one in several if "accepts" in each.metadata else ():
            if not each.metadata["accepts"](one):
                text = f"{key} = {shortened(one)} is not {each.metadata['words']}."
                if near := nearest(str(one), map(str, each.metadata.get("choices", ()))):
                    text += f" Did you mean {near}?"
                yield Fault((key,), text)
                break


def converted(value: Any, kind: Any) -> Any:
    """Convert a value to the type of its field; ValueError says what was expected."""
    if get_origin(kind) in (Union, UnionType):
        if value is None and NoneType in get_args(kind):
            return None
        first, *others = (each for each in get_args(kind) if each is not NoneType)
        return value if others and isinstance(value, tuple(others)) else converted(value, first)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list | tuple):
            raise ValueError("a list such as [1, 2]")
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(value) != len(kinds):
            raise ValueError(f"a list of {len(kinds)}")
        return tuple(converted(item, k) for item, k in zip(value, kinds, strict=True))
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise ValueError("a table of keys")
        return dict(value)
    is_number = kind in ABSTRACT and not isinstance(value, bool)
    if not isinstance(value, ABSTRACT[kind] if is_number else kind) or (
        isinstance(value, bool) and kind in ABSTRACT
    ):
        raise ValueError(NAMES[kind])
    try:
        return kind(value) if is_number else value
    except OverflowError:
        raise ValueError("a number that is small enough") from None


def shortened(value: Any) -> str:
    """A value for a message; Python refuses to print an integer of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a very large number"
    return text if len(text) <= 100 else f"{text[:100]}..."
