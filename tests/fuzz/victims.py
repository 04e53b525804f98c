"""Commands that write, to be killed: what a user types, types again after a kill, and gets."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.fuzz import seeds

Command = tuple[str, ...] | Callable[[], None]  # words of the command line, or a function
MODULES = (
    "cli",
    "trainer.commands",
    "exporter.commands",
    "exporter.tool_commands",
    "exporter.exporting",
    "exporter.embedding.embed",
    "exporter.tables",
    "trainer.run.train",
    "trainer.tables",
    "trainer.reporting",
    "onnxruntime",
    "retrieval.merging",
    "retrieval.reporting.gather",
    "retrieval.reporting.page",
    "matplotlib.figure",
    "sklearn.manifold",
)
TIMINGS = ("seconds", "images_per_second")
DATE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
TOLD = ("environment.json", "export.json")
"""Tell when and how often the work was done: only that they are there is compared."""


@dataclass(frozen=True)
class Victim:
    name: str
    begin: Command
    again: Callable[[Path], Command | None]
    """After a kill, in this folder; None: it had finished."""
    weight: int = 1


def shown(command: Command) -> str:
    return command.__name__ if callable(command) else " ".join(command)


def same_or_done(target: str, command: Command) -> Callable[[Path], Command | None]:
    return lambda folder: None if (folder / target).exists() else command


def train_again(folder: Path) -> Command:
    return ("train", "--resume", "r") if (folder / "r" / "last.pt").exists() else TRAIN


def run_command(command: Command) -> str:
    """In the present folder."""
    if callable(command):
        command()
        return "0"
    import cli

    return str(cli.main(["--debug", *command], prog_name="dmltool", standalone_mode=False) or 0)


def write_slowly() -> None:
    """As an embedding of images writes: a row now and then; goes on where it was."""
    from retrieval.formats.hdf5.writing import Writer

    path, rows = Path("w.h5"), 150
    if path.exists():
        return
    vectors = np.random.default_rng(3).standard_normal((rows, 8)).astype(np.float32)
    files = np.array([f"{n}.png" for n in range(rows)])
    splits = {"test": (np.arange(rows) % 9, files)}
    attrs = {"model": "none", "model_sha256": "0" * 64, "normalized": False}
    with Writer(path, splits, 8, attrs=attrs, resume=True) as out:
        for row in np.flatnonzero(~out.done("test")).tolist():
            out.write("test", row, vectors[row : row + 1])
            time.sleep(0.0005)


TRAIN = ("train", "--config", "config.toml", "--out", "r", "--epochs", "3", "--cache", "disk")
EMBED = ("embed", "model.onnx", "images", "--batch-size", "1", "--out", "x.h5")
EXPORT = ("export", "run", "--out", "e")
MERGE = ("merge", "a.h5", "b.h5", "--out", "m.h5")
EVAL = ("eval", "a.h5", "--no-nmi", "--out", "a.json", "--per-class", "a.csv")
REPORT = ("report", "a.h5", "--images", "images", "--map", "pca", "--out", "r.html")
VICTIMS = (
    Victim("writer", write_slowly, lambda _: write_slowly, 5),
    Victim("merge", MERGE, same_or_done("m.h5", MERGE), 4),
    Victim("eval", EVAL, lambda _: (*EVAL, "--force"), 4),
    Victim("train", TRAIN, train_again, 3),
    Victim("embed", EMBED, lambda _: (*EMBED, "--resume"), 2),
    Victim("embed --half", (*EMBED, "--half"), lambda _: (*EMBED, "--half", "--resume"), 2),
    Victim("export", EXPORT, lambda _: (*EXPORT, "--resume")),
    Victim("report", REPORT, same_or_done("r.html", REPORT)),
)


def load_modules() -> None:
    """All that the commands import, and what they compile, before the first fork."""
    from retrieval.evaluation import evaluate

    for module in MODULES:
        importlib.import_module(module)
    evaluate(seeds.vectors(), seeds.labels(), nmi=False, threads=1)


def prepare(folder: Path) -> str:
    """What the commands read: images, a run, its model and two embedding files."""
    seeds.run_folder(folder)
    os.chdir(folder)
    shutil.copy("run/config.toml", ".")
    run_command(("export", "run"))
    shutil.move("run/model.onnx", ".")
    for name in ("embeddings.h5", "export.json"):
        Path("run", name).unlink()
    for name in ("a.h5", "b.h5"):
        run_command(("embed", "model.onnx", "images", "--out", name))
    shutil.rmtree("cache", ignore_errors=True)
    return ""


def contents(folder: Path) -> dict[str, str]:
    """Every file with a digest of all in it that the same work gives again."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found[str(path.relative_to(folder))] = _digest(path)
    return found


def _digest(path: Path) -> str:
    if path.name in TOLD:
        return "there"
    if path.suffix == ".h5":
        return _hdf5(path)
    data = path.read_bytes()
    if path.suffix == ".html":
        data = DATE.sub(b"", data)
    if path.name == "metrics.jsonl":
        records = [json.loads(line) for line in data.splitlines()]
        kept = [{k: v for k, v in record.items() if k not in TIMINGS} for record in records]
        data = json.dumps(kept).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _hdf5(path: Path) -> str:
    """Arrays and attributes, but for the date."""
    import h5py

    found = hashlib.sha256()

    def add(name: str, item: h5py.Group | h5py.Dataset) -> None:
        found.update(name.encode())
        attrs = {key: str(value) for key, value in item.attrs.items() if key != "created"}
        found.update(json.dumps(attrs, sort_keys=True).encode())
        if isinstance(item, h5py.Dataset):
            values = np.asarray(item[()])
            plain = values.tolist() if values.dtype.hasobject else values.tobytes()
            found.update(repr(plain).encode())

    with h5py.File(path, "r", locking=False) as file:
        add("", file)
        file.visititems(add)
    return found.hexdigest()[:16]
