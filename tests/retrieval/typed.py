"""Compare values with the typed dicts that describe them."""

from types import UnionType
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict


def faults(value: object, kind: Any, where: str = "") -> list[str]:
    """The places where a value is not of its type."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return []
    if is_typeddict(kind):
        return _dict_faults(value, get_type_hints(kind, include_extras=True), where)
    if origin in (Union, UnionType):
        found = [faults(value, one, where) for one in args]
        return [] if [] in found else max(found, key=len)
    if origin is list and isinstance(value, list):
        return [
            fault for n, one in enumerate(value) for fault in faults(one, args[0], f"{where}[{n}]")
        ]
    if origin is dict and isinstance(value, dict):
        return [
            fault for key, one in value.items() for fault in faults(one, args[1], f"{where}.{key}")
        ]
    fits = isinstance(value, int | float if kind is float else origin or kind)
    return [] if fits else [f"{where}: {value!r} is no {kind}"]


def _dict_faults(value: object, hints: dict[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no dict"]
    needed = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
    found = [f"{where}.{name}: missing" for name in sorted(needed - value.keys())]
    found += [f"{where}.{name}: unknown" for name in sorted(value.keys() - hints.keys())]
    for name in hints.keys() & value.keys():
        hint = hints[name]
        own = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        found += faults(value[name], own, f"{where}.{name}")
    return found
