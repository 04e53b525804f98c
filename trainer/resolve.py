"""A config from a preset or a file, and from what the command line changes of it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from retrieval.errors import DmlError
from retrieval.registry import nearest, unknown
from trainer import losses
from trainer.config import BadSettings, Config, Data
from trainer.data.datasets import DATASETS

PRESETS = Path(__file__).parent / "presets"
LARGEST = 100_000  # bytes of a configuration; ours have some 3,000
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
LONG_NAME = re.compile(rf"""(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{16}}""")
ANY_TIME = (
    *("data.root", "data.cache", "data.workers"),
    *("run.device", "run.threads", "run.compile", "run.tensorboard"),
)
"""What may change when a run is resumed. Other devices, compilers and threads round differently."""
EPOCHS = "schedule.epochs"
"""May grow: the schedule is from then on that of a run with so many epochs."""


def resolve(
    preset: str | None,
    file: Path | None,
    flags: Mapping[str, Any],
    settings: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
) -> tuple[Config, str]:
    """The config and a name for its run.

    flags: values by dotted key, such as {"optimizer.lr": 0.1}; settings: `table.key=value`, which
    come last. names: what the flags are called, such as {"optimizer.lr": "--lr"}, for messages.
    Without a preset or a file, the preset that fits the data set and the loss; a place of the data
    alone means a folder of images, or a table.
    """
    if preset and file:
        raise DmlError(
            "--preset and --config exclude each other.",
            "Both say where to start.",
            "Give one of them.",
        )
    settings = list(settings)
    named = bool(preset or file)
    flags = dict(flags) if named else with_data_set(flags, settings)
    said = spoken(flags, settings)
    loss = said.get("loss.name")
    if not named:
        preset = starting_preset(flags, settings)
    tables = read_toml(file or preset_path(preset))
    odd = [name for name, table in tables.items() if not isinstance(table, dict)]
    if odd:
        raise DmlError(
            f"{file} cannot be used as a configuration.",
            "\n".join(unknown_key(name, get_type_hints(Config)) for name in odd),
            "Keys belong into tables, such as [schedule]: see docs/settings.md",
        )
    table = tables.get("loss", {})
    if loss and isinstance(table, dict) and loss != table.get("name"):
        # Options belong to a loss.
        tables["loss"] = {k: v for k, v in table.items() if k == "monitor"}
        if (
            not named
            and losses.LOSSES.find(loss).compares
            and not any(key.startswith("batches.") for key in (*flags, *_keys(settings)))
        ):
            tables.setdefault("batches", {})["balance"] = True
    if said.get("network.weights") == "none":
        # Statistics that were never learnt are not worth keeping.
        tables.setdefault("network", {})["freeze_batchnorm"] = False
    for key, value in flags.items():
        name, _, last = key.partition(".")
        tables.setdefault(name, {})[last] = value
    source = f"The configuration from {file or f'the preset {preset}'}"
    try:
        config = from_dict(with_settings(tables, settings), source)
    except BadSettings as error:
        raise blamed(error, flags, settings, names or {}) from None
    if named:
        return config, file.stem if file else preset
    return config, f"{config.data.dataset}-{config.loss.name}".replace(":", "-").replace("/", "-")


def with_data_set(flags: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The flags; a place of the data alone means a folder with one for each class, or a table."""
    said = spoken(flags, settings)
    if "data.root" not in said or "data.dataset" in said:
        return dict(flags)
    table = Path(said["data.root"]).expanduser().is_file()
    return {"data.dataset": "csv" if table else "folder", **flags}


def spoken(flags: Mapping[str, Any], settings: Iterable[str]) -> dict[str, str]:
    """Names that flags or settings give, by dotted key; settings come last."""
    pairs = (setting.partition("=") for setting in settings)
    said = {**flags, **{key.strip(): toml_value(text.strip()) for key, _, text in pairs}}
    return {key: value for key, value in said.items() if isinstance(value, str)}


def starting_preset(flags: Mapping[str, Any], settings: Iterable[str]) -> str:
    """The preset for a run that names neither a preset nor a file."""
    settings = list(settings)
    said = spoken(with_data_set(flags, settings), settings)
    names = (said.get(key) for key in ("data.dataset", "loss.name", "network.weights"))
    return default_preset(*names)


def _keys(settings: Iterable[str]) -> list[str]:
    return [setting.partition("=")[0].strip() for setting in settings]


def blamed(
    error: BadSettings, flags: Mapping[str, Any], settings: Iterable[str], names: Mapping[str, str]
) -> DmlError:
    """The same problems, by the flags that caused them; others are those of the preset or file."""
    given = {key: names.get(key, f"--set {key}") for key in flags}
    given |= {key: f"--set {key}" for key in _keys(settings)}
    found, lines = [], []
    for text in error.problems:
        about = text.partition(";")[0]  # without the key that may have been meant
        flag = ""
        for key, name in given.items():
            table = f"there is no key {key.partition('.')[0]}"
            if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", about) or about == table:
                flag = flag or name
                spoken = f"{name} = " if name.endswith(key) else f"{name} "
                text = text.replace(f"{key} = ", spoken)
        found.append(flag)
        lines.append(text)
    if not all(found):
        return BadSettings(error.what, lines, error.fix)
    wrong = list(dict.fromkeys(found))
    return BadSettings(
        f"{', '.join(wrong)} cannot be used.", lines, "All settings: dmltool train --dry-run"
    )


def default_preset(dataset: str | None, loss: str | None, weights: str | None = None) -> str:
    """For a data set, a loss and weights that were named without a preset."""
    dataset, known = dataset or Data().dataset, preset_names()
    entry = DATASETS.entries.get(dataset)
    family = (entry and entry.presets) or dataset
    own = "photos-scratch-ce" if weights == "none" else "photos-ce"
    wanted = [f"{family}-{loss}", f"{family}-ce", f"{family}-spce", own]
    return next(name for name in wanted if name in known)


def needs_weights(file: Path) -> bool:
    """Whether the settings of a file are for a network that starts from pretrained weights."""
    return read_toml(file).get("network", {}).get("weights", "none") != "none"


def resumed(
    saved: Config,
    flags: Mapping[str, Any],
    settings: Iterable[str],
    names: Mapping[str, str] | None = None,
) -> Config:
    """The config of a checkpoint; only what its result does not depend on, and more epochs."""
    tables, settings, names = saved.to_dict(), list(settings), names or {}
    given = [*flags, *_keys(settings)]
    fixed = [key for key in given if key not in (*ANY_TIME, EPOCHS)]
    if fixed:
        raise DmlError(
            f"{names.get(fixed[0], fixed[0])} cannot be changed when a run is resumed.",
            f"The result would be that of neither run. Free to change: {', '.join(ANY_TIME)}, "
            "and more epochs.",
            "Start another run for it, with another --out.",
        )
    for key, value in flags.items():
        name, _, last = key.partition(".")
        tables[name][last] = value
    try:
        config = from_dict(with_settings(tables, settings), "The checkpoint's configuration")
    except BadSettings as error:
        raise blamed(error, flags, settings, names) from None
    before, now = saved.schedule.epochs, config.schedule.epochs
    if now < before:
        raise DmlError(
            f"--epochs {now} is fewer than the {before} of the run.",
            "A run that is resumed can be given more epochs, not fewer.",
            f"--epochs {2 * before}, for example, or another run with another --out.",
        )
    return config


def from_dict(given: Mapping[str, Any], source: str) -> Config:
    """A config from nested tables; unknown keys and wrong types are errors, told all at once."""
    tables, found = {}, []
    types = get_type_hints(Config)
    for name, table in given.items():
        if name not in types:
            found.append(unknown_key(name, types))
            continue
        if not isinstance(table, Mapping):
            found.append(f"{name} = {table!r}: a table of keys belongs here")
            continue
        hints = get_type_hints(types[name])
        values = {}
        for key, value in table.items():
            if key not in hints:
                found.append(unknown_key(key, hints, f"{name}."))
                continue
            try:
                values[key] = converted(value, hints[key])
            except ValueError as error:
                found.append(f"{name}.{key} = {shortened(value)}: {error}")
        tables[name] = types[name](**values)
    if found:
        raise BadSettings(
            f"{source} cannot be used as a configuration.",
            found,
            "All keys and their defaults: dmltool train --dry-run",
        )
    return Config(**tables)


def shortened(value: Any) -> str:
    """A value for a message; Python itself refuses to print an integer of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a very large number"
    return text if len(text) <= 100 else f"{text[:100]}..."


def unknown_key(key: str, valid: Iterable[str], table: str = "") -> str:
    """Names the nearest key, of this table or of another."""
    everywhere = {
        name: f"{part.name}.{name}"
        for part in fields(Config)
        for name in get_type_hints(get_type_hints(Config)[part.name])
    }
    if key in everywhere:
        return f"there is no key {table}{key}; did you mean {everywhere[key]}?"
    valid = list(valid)
    near = nearest(key, valid)
    near = f"{table}{near}" if near else everywhere.get(nearest(key, everywhere))
    hint = f"did you mean {near}?" if near else f"there are {', '.join(valid)}"
    return f"there is no key {table}{key}; {hint}"


def converted(value: Any, kind: Any) -> Any:
    """The value as the type of its field; ValueError says what was expected."""
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list | tuple):
            raise ValueError("a list belongs here, such as [1, 2]")
        if kinds[-1] is Ellipsis:
            return tuple(converted(item, kinds[0]) for item in value)
        if len(value) != len(kinds):
            raise ValueError(f"a list of {len(kinds)} belongs here")
        return tuple(converted(item, k) for item, k in zip(value, kinds, strict=True))
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise ValueError("a table of keys belongs here")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("a smaller number belongs here") from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise ValueError(f"{names[kind]} belongs here")
    return value


STRAY = re.compile(rb"\\udc[89a-f][0-9a-f]")  # how `write_text` escapes bytes that are not UTF-8


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a configuration; what is far larger or deeper than one is not parsed."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise DmlError(
            f"There is no configuration {path}.",
            "A file in TOML was expected.",
            "Make one: dmltool train --preset glyphs-ce --dry-run > my.toml",
        ) from None
    except OSError as error:
        raise DmlError(f"{path} cannot be read.", f"{error.strerror}.", "Name a file.") from error
    if len(data) > LARGEST:
        raise DmlError(
            f"{path} is not a configuration.",
            f"It is larger than {LARGEST:,} bytes.",
            "Make one: dmltool train --preset glyphs-ce --dry-run > my.toml",
        )
    try:
        return parse_toml(data.decode("utf-8"))
    except ValueError as error:  # of TOML, or of UTF-8
        if stray := STRAY.search(data):
            line = data.count(b"\n", 0, stray.start()) + 1
            raise DmlError(
                f"{path}, line {line}: the name of a file or folder is not UTF-8.",
                "TOML cannot hold such a name.",
                "Rename the file or folder, and write its new name into that line.",
            ) from error
        raise DmlError(
            f"{path} is not TOML.", f"{error}.", "Mend the line that is named."
        ) from error


def parse_toml(text: str) -> dict[str, Any]:
    """As tomllib does it, which takes minutes for names of thousands of parts: a ValueError."""
    if LONG_NAME.search(text):
        raise ValueError("It holds a name of more than 16 parts, such as a.b.c")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("Its lists or tables are nested too deeply") from None


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_path(name: str) -> Path:
    if name not in (known := preset_names()):
        raise unknown("preset", name, known, "--preset")
    return PRESETS / f"{name}.toml"


def preset_summary(name: str) -> str:
    """The first line of a preset's header."""
    first = preset_path(name).read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("#").strip()


def with_settings(base: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """`table.key=value` for each setting; the value is TOML, or a bare word."""
    result = {name: dict(table) for name, table in base.items()}
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        path = dotted.strip().split(".")
        if not equals or not all(path):
            raise DmlError(
                f"--set {setting} is not understood.",
                "It takes the form table.key=value.",
                "Write it so: --set optimizer.lr=0.01",
            )
        if len(path) == 1:
            raise DmlError(
                f"--set {setting} names no table.",
                unknown_key(path[0], get_type_hints(Config)),
                "Write it so: --set optimizer.lr=0.01",
            )
        place = result
        for name in path[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise DmlError(
                    f"--set {setting} is not understood.",
                    f"{name} is not a table.",
                    "Write it so: --set optimizer.lr=0.01",
                )
        place[path[-1]] = toml_value(text.strip())
    return result


def toml_value(text: str) -> Any:
    if text in ("True", "False"):  # as Python spells them
        return text == "True"
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
