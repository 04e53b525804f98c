"""The parameters of a sweep and the values they may take: --grid, and files for --space."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from retrieval.errors import DmlError
from trainer import toml
from trainer.config import Config
from trainer.data.datasets.splitting import Division
from trainer.validate import unknown_key

EXAMPLE = "Write lines such as: optimizer.lr = {low = 1e-4, high = 0.1, log = true}"
FORMS = (
    "A parameter is a list of choices such as [5, 10], or a range such as "
    "{low = 1e-4, high = 0.1, log = true}; a range of whole numbers has whole ends"
)
VALIDATION = ("run.select", *(f"data.{each.name}" for each in fields(Division)))
"""The settings that say which images choose the best epoch, and here the best setting."""

Choices = tuple[str, ...]
"""Some values, each as the text of TOML that --set takes."""


@dataclass(frozen=True)
class Range:
    """All numbers from low to high; log: as many from 1 to 10 as from 10 to 100."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant: both ends are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> Choices:
        """Both ends, as text."""
        kind = int if self.whole else float
        return repr(kind(self.low)), repr(kind(self.high))


Space = dict[str, Choices | Range]


def from_grid(texts: Iterable[str]) -> Space:
    """The choices of every `table.key=value,value,...`."""
    space: Space = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        found = split_values(values)
        if not equals or "." not in key or not found:
            why = "It takes the form table.key=value,value."
            if "." not in key:
                why = f"{unknown_key(key, get_type_hints(Config)).text} {why}"
            fix = "Write, for example: --grid optimizer.lr=0.001,0.003"
            raise DmlError(f"--grid {text} is not understood.", why, fix)
        _add(space, key, tuple(map(toml.render, found)), "--grid")
    return space


def split_values(text: str) -> list[Any]:
    """The values between commas: those of a TOML list, else bare words."""
    listed = toml.parse_value(f"[{text}]")
    if isinstance(listed, list):
        return listed
    return [toml.parse_value(part.strip()) for part in text.split(",") if part.strip()]


def from_file(path: Path, grid: Space | None = None) -> Space:
    """The ranges and choices of a TOML file, whose keys are those of a configuration.

    grid: parameters that the result has in addition, ahead of those of the file.
    """
    space = dict(grid or {})
    leaves = list(_leaves(toml.read(path, "file of parameters", EXAMPLE)))
    if not leaves:
        raise DmlError(f"{path} names no parameters.", f"{FORMS}.", EXAMPLE)
    for key, value in leaves:
        _add(space, key, _parameter(key, value, path), str(path))
    return space


def _add(space: Space, key: str, parameter: Choices | Range, source: str) -> None:
    if key in space:
        raise DmlError(
            f"{source} names {key}, which was named before.",
            "All values of a parameter belong together.",
            "Name it once, with a list of its values.",
        )
    if isinstance(parameter, tuple) and len(set(parameter)) < len(parameter):
        raise DmlError(
            f"{source} gives {key} a value twice.",
            f"It has {', '.join(parameter)}.",
            "Leave one of them out; --seeds N trains each setting N times.",
        )
    if key == "run.seed":
        raise DmlError(
            "The setting run.seed cannot be swept.",
            "Every setting has the same seeds.",
            "Use --seeds N.",
        )
    if key in VALIDATION:
        raise DmlError(
            f"The setting {key} cannot be swept.",
            "It chooses the images that settings are compared on, which must be the same for all.",
            f"Give all settings one value: --set {key}=VALUE",
        )
    space[key] = parameter


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The lists and ranges of nested tables, by dotted key."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not {"low", "high"} & value.keys():
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _parameter(key: str, value: Any, path: Path) -> Choices | Range:
    if isinstance(value, list) and value:
        return tuple(map(toml.render, value))
    wrong = DmlError(
        f"{path}: {key} = {toml.render(value)} is not understood.",
        f"{FORMS}.",
        f"Write, for example: {key} = {{low = 1, high = 8}}"
        if isinstance(value, Mapping)
        else f"Leave it out of this file if it does not vary: --set {key}={toml.render(value)}",
    )
    try:
        found = Range(**value)
    except TypeError:  # no table, or another key
        raise wrong from None
    ends = (found.low, found.high)
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if not numbers or not isinstance(found.log, bool):
        raise wrong
    if not -math.inf < found.low < found.high < math.inf:
        raise wrong
    if found.log and found.low <= 0:
        raise DmlError(
            f"{path}: {key} begins at {found.low}.",
            "The logarithm of a range needs numbers above 0.",
            "Begin above 0, or leave out log = true.",
        )
    return found


def cells(space: Space) -> list[dict[str, str]]:
    """Every combination of the choices: the settings of a grid, the last parameter fastest."""
    choices = []
    for key, parameter in space.items():
        if isinstance(parameter, Range):
            raise DmlError(
                f"A grid cannot hold the range of {key}.",
                "A range has no end of values.",
                "Draw from it: --random 50 or --tpe 50, or name values: --grid.",
            )
        choices.append(parameter)
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]


def to_json(space: Space) -> dict[str, Any]:
    """The space as lists and dicts."""
    return {
        key: asdict(parameter) if isinstance(parameter, Range) else list(parameter)
        for key, parameter in space.items()
    }
