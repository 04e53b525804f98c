"""Check options of losses, miners and data sets: their names, and the types of their values."""

import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from retrieval import registry
from retrieval.errors import DmlError
from retrieval.settings import NAMES, converted

BY_NAME = {kind.__name__: kind for kind in NAMES}  # annotations may be text


def options_of(taking: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options of a loss class or of a data set's reader: its keyword-only parameters."""
    parameters = inspect.signature(taking).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_options(
    of: str,
    given: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    defaults: Mapping[str, Any],
    table: str,
) -> None:
    """Raise for the first option that does not exist or whose value is of another type.

    of: who takes the options, such as "The loss 'ce'". defaults: values that replace those of the
    parameters. table: where the options are set, such as loss.options.
    """
    registry.check_options(of, given, parameters, table)
    for option, value in given.items():
        kind = _kind(parameters[option], defaults.get(option))
        try:
            converted(value, kind)
        except ValueError as error:
            raise DmlError(
                f"{of} cannot use {option} = {value!r}.",
                f"{option} is {error}.",
                f"Give another value, or leave it out for its default: --set {table}.{option}=...",
            ) from None


def _kind(parameter: inspect.Parameter, default: Any) -> Any:
    """The type of a parameter by its annotation, else by its default; object: not known.

    A default such as 0 or 1 says only that it is a number, and one of text may be one of several
    kinds ("all" or a number).
    """
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = BY_NAME.get(annotation)
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    if all(any(member is kind for kind in (*NAMES, NoneType)) for member in members):
        return annotation
    if default is None:
        default = parameter.default
    if isinstance(default, bool):
        return bool
    return float if isinstance(default, int | float) else object
