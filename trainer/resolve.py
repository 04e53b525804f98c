"""Make the config of a run: a preset or a file, changed by options and settings."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, get_type_hints

from retrieval.errors import DmlError
from retrieval.registry import unknown
from retrieval.settings import BadSettings
from trainer import losses, toml
from trainer.config import Config, Data
from trainer.data.datasets import DATASETS, kind_of
from trainer.validate import blamed, from_dict, unknown_key

PRESETS = Path(__file__).parent / "presets"
ANY_TIME = (
    "data.root",
    "data.cache",
    "data.workers",
    "run.device",
    "run.threads",
    "run.compile",
    "run.log",
)
"""What may change when a run is resumed. Other devices, compilers and threads round differently."""
OWN_IMAGES = "photos"
"""What the names of the presets for images of your own start with."""
EPOCHS = "schedule.epochs"
"""May grow when a run is resumed: from then on the schedule is that of the longer run."""


def resolve(
    preset: str | None,
    file: Path | None,
    flags: Mapping[str, Any],
    settings: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
) -> tuple[Config, str]:
    """Return the config and a name for its run.

    flags: values by dotted key, such as {"optimizer.lr": 0.1}; settings: `table.key=value`, which
    come last. names: what the flags are called, such as {"optimizer.lr": "--lr"}, for messages.
    Without a preset or a file, the preset that fits the data set and the loss is taken.
    """
    if preset and file:
        raise DmlError(
            "--preset and --config exclude each other.",
            "Both say where to start.",
            "Give one of them.",
        )
    named, sets = bool(preset or file), parsed(settings)
    changes = {**flags, **sets}
    if not named:
        changes = with_data_set(changes)
    preset = preset or ("" if file else starting_preset(changes))
    tables = toml.read(file or preset_path(preset))
    adapt(tables, changes, named)
    source = f"The configuration from {file or f'the preset {preset}'}"
    config = combined(tables, changes, _without(names, sets), source)
    if named:
        return config, file.stem if file else preset
    return config, f"{config.data.dataset}-{config.loss.name}".replace(":", "-").replace("/", "-")


def adapt(tables: dict, changes: Mapping[str, Any], named: bool) -> None:
    """Adapt the settings of a preset or file to another loss, or to a start without weights."""
    given, own = _texts(changes), tables.get("loss", {})
    loss = given.get("loss.name")
    if loss and isinstance(own, dict) and loss != own.get("name"):
        # Options belong to a loss, and so do first epochs on its head.
        tables["loss"] = {k: v for k, v in own.items() if k == "monitor"}
        tables.pop("phase", None)
        compares = not named and losses.LOSSES.find(loss).compares
        if compares and not any(key.startswith("batches.") for key in changes):
            tables.setdefault("batches", {})["balance"] = True
    elif isinstance(own, dict) and given.get("loss.miner", own.get("miner")) != own.get("miner"):
        own.pop("miner_options", None)  # they belong to another miner
    if given.get("network.weights") == "none" and isinstance(tables.get("network", {}), dict):
        # Statistics that were never learnt are not worth keeping.
        tables.setdefault("network", {})["freeze_batchnorm"] = False


def combined(
    tables: dict[str, Any], changes: Mapping[str, Any], names: Mapping[str, str], source: str
) -> Config:
    """The config of tables and of what changes in them; problems name the options by `names`."""
    options = {key: names.get(key, f"--set {key}") for key in changes}
    try:
        return from_dict(changed(tables, changes), source)
    except BadSettings as error:
        raise blamed(error, options) from None


def with_data_set(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, with a data set if only its place is given: a table, or a folder of classes."""
    said = _texts(changes)
    if "data.root" not in said or "data.dataset" in changes:
        return dict(changes)
    return {"data.dataset": kind_of(said["data.root"]), **changes}


def starting_preset(changes: Mapping[str, Any]) -> str:
    """The preset for a run that names neither a preset nor a file."""
    said = _texts(with_data_set(changes))
    return default_preset(*map(said.get, ("data.dataset", "loss.name", "network.weights")))


def _texts(changes: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in changes.items() if isinstance(value, str)}


def _without(names: Mapping[str, str] | None, keys: Iterable[str]) -> dict[str, str]:
    """The names of flags without those that a setting overrides."""
    return {key: name for key, name in (names or {}).items() if key not in keys}


def default_preset(dataset: str | None, loss: str | None, weights: str | None = None) -> str:
    """The preset for a data set, a loss and weights that were named without a preset.

    It is that of the data set for the loss, or else its first one; for a data set without presets,
    the first one for images of your own that starts as the weights say.
    """
    dataset = dataset or Data().dataset
    entry = DATASETS.entries.get(dataset)
    family = (entry and entry.presets) or dataset
    if known := _presets_of(family):
        return f"{family}-{loss}" if f"{family}-{loss}" in known else known[0]
    return own_images_preset(pretrained=weights != "none")


def own_images_preset(pretrained: bool) -> str:
    """The first preset for images of your own that starts from pretrained weights or does not."""
    names = _presets_of(OWN_IMAGES)
    return next(name for name in names if needs_weights(preset_path(name)) == pretrained)


def _presets_of(family: str) -> list[str]:
    return [name for name in preset_names() if name.startswith(f"{family}-")]


def needs_weights(file: Path) -> bool:
    """Whether the settings of a file are for a network that starts from pretrained weights."""
    return toml.read(file).get("network", {}).get("weights", "none") != "none"


def resumed(
    saved: Config,
    flags: Mapping[str, Any],
    settings: Iterable[str],
    names: Mapping[str, str] | None = None,
) -> Config:
    """The config of a resumed run; of what its result depends on, only epochs may change."""
    sets, names = parsed(settings), names or {}
    changes = {**flags, **sets}
    source = "The checkpoint's configuration"
    config = combined(saved.to_dict(), changes, _without(names, sets), source)
    before, now = saved.dotted(), config.dotted()
    free = {*ANY_TIME, EPOCHS, *(key for key in now if now[key] == before[key])}
    fixed = [key for key in changes if ".".join(key.split(".")[:2]) not in free]
    if fixed:
        raise DmlError(
            f"{names.get(fixed[0], fixed[0])} cannot be changed when a run is resumed.",
            f"The result would be that of neither run. Free to change: {', '.join(ANY_TIME)}, "
            "and more epochs.",
            "Start another run for it, with another --out.",
        )
    if now[EPOCHS] < before[EPOCHS]:
        raise DmlError(
            f"--epochs {now[EPOCHS]} is fewer than the {before[EPOCHS]} of the run.",
            "A run that is resumed can be given more epochs, not fewer.",
            f"--epochs {2 * before[EPOCHS]}, for example, or another run with another --out.",
        )
    return config


def preset_names() -> list[str]:
    """All presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_path(name: str) -> Path:
    """The file of a preset."""
    if name not in (known := preset_names()):
        raise unknown("preset", name, known, "--preset", listed="presets")
    return PRESETS / f"{name}.toml"


def preset_summary(name: str) -> str:
    """The first line of a preset's header."""
    first = preset_path(name).read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("#").strip()


def parsed(settings: Iterable[str]) -> dict[str, Any]:
    """The values of settings `table.key=value` by key; a value is TOML, or a bare word."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        path = key.split(".")
        if not equals or not all(path):
            raise _wrong_setting(setting, "It takes the form table.key=value.")
        if len(path) == 1:
            tables = get_type_hints(Config)
            why = f"{key} is a table, and --set changes one of its keys."
            raise _wrong_setting(setting, why if key in tables else unknown_key(key, tables).text)
        found.pop(key, None)  # the last one counts, and comes last
        found[key] = toml.parse_value(text)
    return found


def changed(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tables with other values of some keys."""
    result = deepcopy(dict(tables))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = result
        if not isinstance(place.get(path[0], {}), dict):
            continue  # the tables themselves are at fault, and will be refused
        for name in path:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise _wrong_setting(f"{key}={value}", f"{name} is not a table.")
        place[last] = value
    return result


def _wrong_setting(setting: str, why: str) -> DmlError:
    fix = "Write, for example: --set optimizer.lr=0.01"
    return DmlError(f"--set {setting} is not understood.", why, fix)
