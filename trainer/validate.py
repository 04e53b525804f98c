"""Check settings: keys, types, names of losses, data sets and backbones, and their options.

There is one way to report problems: all of them together, a line each, in `BadSettings`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from retrieval.errors import DmlError
from retrieval.registry import nearest
from retrieval.settings import BadSettings, Fault, converted, shortened
from trainer.config import Config, Optimizer

FIX = "Change them with --set table.key=value, or in the file. All keys: dmltool train --dry-run"


def from_dict(given: Mapping[str, Any], source: str, fix: str = FIX) -> Config:
    """Make a config of nested tables; BadSettings lists all problems of keys, types and values.

    source: where the tables are from, such as "The configuration from my.toml".
    fix: how to change them.
    """
    types = get_type_hints(Config)
    tables: dict[str, dict[str, Any]] = {}
    found: list[Fault] = []
    for name, table in given.items():
        if name not in types:
            found.append(unknown_key(name, types))
        elif not isinstance(table, Mapping):
            text = f"{name} = {shortened(table)} is not a table of keys."
            found.append(Fault((name,), text))
        else:
            tables[name] = _sound(name, table, types[name], found)
    phase = tables.get("phase", {})
    if "optimizer" in phase:
        own = phase["optimizer"]
        phase["optimizer"] = _sound("phase.optimizer", own, Optimizer, found)
    doubtful = {key for problem in found for key in problem.keys}
    try:
        config = Config(**{name: types[name](**values) for name, values in tables.items()})
    except BadSettings as error:
        found += [problem for problem in error.problems if not doubtful & set(problem.keys)]
    if found:
        raise BadSettings(f"{source} cannot be used.", found, fix)
    return config


def _sound(name: str, given: Mapping[str, Any], kind: type, found: list[Fault]) -> dict[str, Any]:
    """The values of a table that are of the right type; the problems of others join `found`."""
    hints, values = get_type_hints(kind), {}
    for key, value in given.items():
        if key not in hints:
            found.append(unknown_key(key, hints, f"{name}."))
            continue
        try:
            values[key] = converted(value, hints[key])
        except ValueError as error:
            text = f"{name}.{key} = {shortened(value)} is not {error}."
            found.append(Fault((f"{name}.{key}",), text))
    return values


def blamed(error: BadSettings, options: Mapping[str, str]) -> BadSettings:
    """The same problems in the words of the command line, if its options have caused them all.

    options: those that were given, by the key that they set: {"optimizer.lr": "--lr"}.
    """
    found, causes = [], []
    for keys, text, fix in error.problems:
        own = [o for o in options if any(o == key or o.startswith(f"{key}.") for key in keys)]
        for key in own:
            name = options[key]
            text = text.replace(f"{key} = ", f"{name} = " if name.endswith(key) else f"{name} ")
        found.append(Fault(keys, text, fix))
        causes.append(options[own[0]] if own else "")
    if not all(causes):
        return BadSettings(error.what, found, error.fix)
    what = f"{', '.join(dict.fromkeys(causes))} cannot be used."
    return BadSettings(what, found, "To see all settings: dmltool train --dry-run")


def check_names(config: Config) -> None:
    """Raise for losses, backbones, data sets and options of theirs that do not exist.

    torch is loaded only where options of a loss, or names of another library, are to be checked.
    """
    from trainer import losses, trackers
    from trainer.data import datasets
    from trainer.losses import miners
    from trainer.networks import backbones

    loss = config.loss
    checks: dict[str, Callable[[], object]] = {
        "loss.name": lambda: miners.check(loss.name, loss.options, loss.miner, loss.miner_options),
        "loss.monitor": lambda: losses.check_monitors(loss.monitor, loss.name, loss.options),
        "phase.epochs": lambda: losses.check_phase(config.phase.epochs, loss.name, loss.options),
        "loss.options": lambda: check_anchors(config),
        "network.backbone": lambda: backbones.check(config.network.backbone, config.input.crop),
        "data.dataset": lambda: datasets.check(config.data.dataset, config.data.options),
        "run.log": lambda: trackers.check(config.run.log),
    }
    errors: dict[str, tuple[str, DmlError]] = {}  # an unknown loss fails several checks
    for key, check in checks.items():
        try:
            check()
        except DmlError as error:
            errors.setdefault(str(error), (key, error))
    if len(errors) == 1:
        raise next(error for _, error in errors.values())
    if errors:
        found = [Fault((key,), f"{each.what} {each.fix}") for key, each in errors.values()]
        raise BadSettings(f"The configuration has {len(found)} problems.", found, FIX)


def check_anchors(config: Config) -> None:
    """Raise if a loss takes all images of a batch as anchors: nothing is refined then."""
    from trainer.losses import LOSSES

    loss, images = config.loss, config.batches.images
    entry = LOSSES.entries.get(loss.name)
    if entry is None or not entry.below_images:
        return
    option = entry.below_images
    anchors = loss.options.get(option, entry.defaults[option])
    if isinstance(anchors, int) and 0 < images <= anchors:
        raise DmlError(
            f"The loss {loss.name!r} cannot use {option} = {anchors} with {images} images per "
            "class.",
            "All images of a batch would be anchors, so that none is left to refine.",
            f"Take fewer anchors, --set loss.options.{option}={images - 1}, or more images per "
            f"class: --batch {config.batches.classes}x{anchors + 1}",
        )


def unknown_key(key: str, valid: Iterable[str], table: str = "") -> Fault:
    """The problem of a key that does not exist; names the nearest, of this table or another."""
    everywhere = {dotted.partition(".")[2]: dotted for dotted in Config().dotted()}
    valid = list(valid)
    near = everywhere.get(key)
    if near is None and (alike := nearest(key, valid)):
        near = f"{table}{alike}"
    near = near or everywhere.get(nearest(key, everywhere))
    hint = f"Did you mean {near}?" if near else f"There are {', '.join(valid)}."
    return Fault((f"{table}{key}",), f"There is no key {table}{key}. {hint}")
