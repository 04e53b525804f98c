"""Make the config of a run: a preset or a file, changed by options and settings."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_type_hints

from retrieval.errors import DmlError
from retrieval.registry import unknown
from trainer import losses, toml
from trainer.config import BadSettings, Config, Data
from trainer.data.datasets import DATASETS
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
    settings = list(settings)
    named = bool(preset or file)
    if not named:
        flags = with_data_set(flags, settings)
    preset = preset or ("" if file else starting_preset(flags, settings))
    tables = toml.read(file or preset_path(preset))
    adapt(tables, flags, settings, named)
    source = f"The configuration from {file or f'the preset {preset}'}"
    config = combined(tables, flags, settings, names or {}, source)
    if named:
        return config, file.stem if file else preset
    return config, f"{config.data.dataset}-{config.loss.name}".replace(":", "-").replace("/", "-")


def adapt(tables: dict, flags: Mapping[str, Any], settings: Iterable[str], named: bool) -> None:
    """Change what a preset or file says where another loss, or no weights, are asked for."""
    given, own = given_names(flags, settings), tables.get("loss", {})
    loss = given.get("loss.name")
    if loss and isinstance(own, dict) and loss != own.get("name"):
        # Options belong to a loss, and so do first epochs on its head.
        tables["loss"] = {k: v for k, v in own.items() if k == "monitor"}
        tables.pop("phase", None)
        compares = not named and losses.LOSSES.find(loss).compares
        if compares and not any(k.startswith("batches.") for k in (*flags, *_keys(settings))):
            tables.setdefault("batches", {})["balance"] = True
    elif isinstance(own, dict) and given.get("loss.miner", own.get("miner")) != own.get("miner"):
        own.pop("miner_options", None)  # they belong to another miner
    if given.get("network.weights") == "none" and isinstance(tables.get("network", {}), dict):
        # Statistics that were never learnt are not worth keeping.
        tables.setdefault("network", {})["freeze_batchnorm"] = False


def combined(
    tables: dict[str, Any],
    flags: Mapping[str, Any],
    settings: Sequence[str],
    names: Mapping[str, str],
    source: str,
) -> Config:
    """The config of tables that flags and then settings change; problems name those options."""
    options = {key: names.get(key, f"--set {key}") for key in flags}
    options |= {key: f"--set {key}" for key in _keys(settings)}
    for key, value in flags.items():
        name, _, last = key.partition(".")
        if isinstance(tables.setdefault(name, {}), dict):
            tables[name][last] = value
    try:
        return from_dict(with_settings(tables, settings), source)
    except BadSettings as error:
        raise blamed(error, options) from None


def with_data_set(flags: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The flags, with a data set if only its place is given: a table, or a folder of classes."""
    said = given_names(flags, settings)
    if "data.root" not in said or "data.dataset" in said:
        return dict(flags)
    table = Path(said["data.root"]).expanduser().is_file()
    return {"data.dataset": "csv" if table else "folder", **flags}


def given_names(flags: Mapping[str, Any], settings: Iterable[str]) -> dict[str, str]:
    """The texts that flags or settings give, by dotted key; settings come last."""
    pairs = (setting.partition("=") for setting in settings)
    said = {**flags, **{key.strip(): toml.parse_value(text.strip()) for key, _, text in pairs}}
    return {key: value for key, value in said.items() if isinstance(value, str)}


def starting_preset(flags: Mapping[str, Any], settings: Iterable[str]) -> str:
    """The preset for a run that names neither a preset nor a file."""
    settings = list(settings)
    said = given_names(with_data_set(flags, settings), settings)
    names = (said.get(key) for key in ("data.dataset", "loss.name", "network.weights"))
    return default_preset(*names)


def _keys(settings: Iterable[str]) -> list[str]:
    return [setting.partition("=")[0].strip() for setting in settings]


def default_preset(dataset: str | None, loss: str | None, weights: str | None = None) -> str:
    """The preset for a data set, a loss and weights that were named without a preset."""
    dataset, known = dataset or Data().dataset, preset_names()
    entry = DATASETS.entries.get(dataset)
    family = (entry and entry.presets) or dataset
    own = "photos-scratch-ce" if weights == "none" else "photos-ce"
    wanted = [f"{family}-{loss}", f"{family}-ce", f"{family}-spce", own]
    return next(name for name in wanted if name in known)


def needs_weights(file: Path) -> bool:
    """Whether the settings of a file are for a network that starts from pretrained weights."""
    return toml.read(file).get("network", {}).get("weights", "none") != "none"


def resumed(
    saved: Config,
    flags: Mapping[str, Any],
    settings: Iterable[str],
    names: Mapping[str, str] | None = None,
) -> Config:
    """The config of a resumed run: nothing changes that its result depends on, but for epochs."""
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
    config = combined(tables, flags, settings, names, "The checkpoint's configuration")
    before, now = saved.schedule.epochs, config.schedule.epochs
    if now < before:
        raise DmlError(
            f"--epochs {now} is fewer than the {before} of the run.",
            "A run that is resumed can be given more epochs, not fewer.",
            f"--epochs {2 * before}, for example, or another run with another --out.",
        )
    return config


def preset_names() -> list[str]:
    """All presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_path(name: str) -> Path:
    """The file of a preset."""
    if name not in (known := preset_names()):
        raise unknown("preset", name, known, "--preset")
    return PRESETS / f"{name}.toml"


def preset_summary(name: str) -> str:
    """The first line of a preset's header."""
    first = preset_path(name).read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("#").strip()


def with_settings(base: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The tables after all settings `table.key=value`; a value is TOML, or a bare word."""
    result = deepcopy(dict(base))
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        path = dotted.strip().split(".")
        if not equals or not all(path):
            raise _wrong_setting(setting, "It takes the form table.key=value.")
        if len(path) == 1:
            why = f"It names no table: {unknown_key(path[0], get_type_hints(Config)).text}."
            raise _wrong_setting(setting, why)
        place = result
        for name in path[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise _wrong_setting(setting, f"{name} is not a table.")
        place[path[-1]] = toml.parse_value(text.strip())
    return result


def _wrong_setting(setting: str, why: str) -> DmlError:
    fix = "Write it so: --set optimizer.lr=0.01"
    return DmlError(f"--set {setting} is not understood.", why, fix)
