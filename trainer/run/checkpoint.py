"""Write and read checkpoint files. `resuming` continues a run from one, an export starts from one.

They hold tensors, numbers, texts, lists and dicts, and are read with weights_only=True: no code in
a file is ever run.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from retrieval.errors import DmlError, command
from retrieval.files import whole_file
from retrieval.loading.folders import best_run
from retrieval.registry import nearest
from retrieval.run_files import BEST, LAST
from trainer import toml
from trainer.config import Config
from trainer.validate import from_dict

FORMAT, VERSION = "dmltool-checkpoint", 1
STARTING = ".starting.toml"  # the settings of a run before its first checkpoint
KEYS = {
    "epoch": int,
    "config": dict,
    "embedder": dict,
    "loss": dict,
    "optimizer": dict,
    "scaler": dict,
    "threads": int,
    "processes": int,
    "label_names": list,
    "data_sha256": str,
    "preprocessing": dict,
    "versions": dict,
    "best": dict,
}


def save(folder: Path, state: Mapping[str, Any], best: bool) -> None:
    """Write last.pt, and best.pt as another name of the same file.

    The best is named first: if the run is killed in between, the epoch is repeated from the old
    last.pt and names it again.
    """
    try:
        with whole_file(folder / LAST, also=folder / BEST if best else None) as file:
            torch.save(canonical({"format": FORMAT, "version": VERSION, **state}), file)
    except (OSError, RuntimeError, DmlError) as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes(error)):
            raise KeyboardInterrupt from error
        first = not (folder / LAST).exists()
        raise DmlError(
            f"The checkpoint of epoch {state['epoch']} cannot be written to {folder}.",
            _reason(error) + ("" if first else " Earlier checkpoints are intact."),
            "Make room there, or choose another --out."
            if first
            else f"Make room, then continue: {command('train', '--resume', folder)}",
        ) from error


def canonical(value: Any) -> Any:
    """A copy whose bytes in a file depend on its content alone; tensors are not copied.

    torch.save writes an object that occurs twice only once. Which equal texts and tuples are one
    object is not the same in a resumed run, which has read some of them from a checkpoint.
    """
    if isinstance(value, str):
        return sys.intern(str(value))
    if isinstance(value, Mapping):
        kind: Any = type(value)
        copied = kind((canonical(key), canonical(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # state dicts of torch keep versions of modules there
            copied._metadata = canonical(value._metadata)
        return copied
    if isinstance(value, list | tuple):
        return type(value)(canonical(item) for item in value)
    return value


def load(path: Path) -> dict[str, Any]:
    """The checkpoint at a path; a folder means its last.pt."""
    given = path
    if path.is_dir():
        path = path / LAST
    if not path.exists():
        raise DmlError(
            f"There is no checkpoint {path}.",
            "A folder made by `dmltool train`, or a checkpoint in it, was expected.",
            _instead(given),
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything for a damaged or hostile file
        why = str(error).split("\n", 1)[0] or "It is empty or cut short."
        fix = "Use one written by `dmltool train`."
        if "weights_only" in str(error) or "Unsupported" in str(error):
            why = "It holds objects other than tensors and plain values; code in it is never run."
        elif path.name in (BEST, LAST):
            fix = _way_out(path)
        raise DmlError(f"{path} cannot be read as a checkpoint.", why, fix) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DmlError(
            f"{path} is not a checkpoint of dmltool.",
            "It was written by another program.",
            "For the weights of a network: --set network.weights=FILE",
        )
    if state.get("version") != VERSION:
        raise DmlError(
            f"{path} is a checkpoint of version {state.get('version')}.",
            f"This dmltool reads version {VERSION}.",
            "Use the dmltool that wrote it, or update this one.",
        )
    wrong = [key for key, kind in KEYS.items() if not isinstance(state.get(key), kind)]
    if wrong := wrong or [key for key in KEYS if not _possible(key, state[key])]:
        raise DmlError(
            f"{path} is damaged.",
            f"Missing or odd in it: {', '.join(wrong)}.",
            _way_out(path),
        )
    return state


def _instead(given: Path) -> str:
    """What to give instead of a path without a checkpoint: another of the run, or a like name."""
    if given.name == BEST and (last := given.with_name(LAST)).exists():
        return f"Use the last one of the run, {last}; to export it: {command('export', last)}"
    folder = given.parent if given.name in (BEST, LAST) else given
    if folder.is_dir():
        runs = [found.parent for found in sorted(folder.glob(f"*/{LAST}"))]
        if run := best_run(folder) or next(iter(runs), None):
            return f"Name a run in it: {quote(str(run))}"
    if given.parent.is_dir() and given.suffix == Path(LAST).suffix:
        names, place = [file.name for file in sorted(given.parent.glob(f"*{given.suffix}"))], given
    else:
        names, place = [file.parent.name for file in folder.parent.glob(f"*/{LAST}")], folder
    if near := nearest(place.name, sorted(names)):
        return f"Did you mean {quote(str(place.with_name(near)))}?"
    return "Look for last.pt or best.pt: ls runs/*"


def _possible(key: str, value: Any) -> bool:
    """Whether a run can have written this value, which has the type of its key."""
    if isinstance(value, int):
        return value >= 0
    if key != "best" or not value:
        return True
    scores = value.get("scores")
    numbers = scores.values() if isinstance(scores, dict) else [None]
    return all(isinstance(number, int | float) for number in (value.get("epoch"), *numbers))


def _way_out(path: Path) -> str:
    """What to do about a damaged checkpoint: the run may have another one."""
    other = path.with_name(LAST if path.name == BEST else BEST)
    if not other.exists() or other.samefile(path):
        return "Train again, with another --out."
    return f"Export the other checkpoint of the run: {command('export', other)}, or train again."


def load_config(path: Path) -> Config:
    """The config that a run was started with, also one that was stopped before its checkpoint."""
    if (path / STARTING).exists() and not (path / LAST).exists():
        return from_dict(toml.read(path / STARTING), f"{path / STARTING}")
    return config_of(load(path), path)


def config_of(state: dict[str, Any], path: Path | None = None) -> Config:
    """The config that a checkpoint carries."""
    source = f"The configuration in {path or 'the checkpoint'}"
    return from_dict(state["config"], source, "Use another checkpoint, or train again.")


def _reason(error: BaseException) -> str:
    """The reason of an error; torch hides the error of the file behind its own."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}."
    return str(error).split("\n", 1)[0].rstrip(".") + "."


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what has led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
