"""Write metrics.jsonl and curves.png; describe the environment."""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from retrieval.distances import DISTANCES
from retrieval.errors import DmlError, command
from retrieval.files import whole_file, write_text
from retrieval.remote.address import without_secrets
from retrieval.run_files import CURVES, METRICS
from trainer.results import EpochRecord

PACKAGES = ("dmltool", "torch", "torchvision", "timm", "pytorch-metric-learning", "numpy", "pillow")


def read_metrics(folder: Path) -> list[EpochRecord]:
    """One record an epoch; a line that a kill cut off, or that is damaged, is left out."""
    try:
        text = (folder / METRICS).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    records: list[EpochRecord] = []
    for line in text.split("\n"):
        try:
            record: EpochRecord = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def is_complete(record: Mapping[str, Any]) -> bool:
    """Whether a record is one that a run can have written."""
    losses = [record.get("parts"), record.get("monitor")]
    recalls = [record.get("scores"), record.get("pixels", {}), record.get("train_scores", {})]
    return (
        isinstance(record.get("epoch"), int)
        and isinstance(record.get("scores_of"), str)
        and isinstance(record.get("loss", ""), int | float | None)
        and _hold(losses, int | float | None)
        and _hold(recalls, int | float)
        and all(recall.keys() in (set(), set(DISTANCES)) for recall in recalls)
        and (record["epoch"] > 0 or all(recalls[:2]))
    )


def _hold(tables: Iterable[object], kind: Any) -> bool:
    return all(
        isinstance(table, dict) and all(isinstance(value, kind) for value in table.values())
        for table in tables
    )


def write_metrics(folder: Path, records: Sequence[EpochRecord]) -> None:
    """Write metrics.jsonl anew."""
    try:
        write_text(folder / METRICS, "".join(map(_line, records)), force=True)
    except DmlError as error:
        raise DmlError(error.what, error.why, "Make room there, then try again.") from error


def _line(record: EpochRecord) -> str:
    """A record as a line of JSON; NaN, which monitored losses may be, becomes null."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(item) for key, item in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(known(record), allow_nan=False) + "\n"


def add_metrics(folder: Path, record: EpochRecord) -> None:
    """Append a record to metrics.jsonl."""
    try:
        with open(folder / METRICS, "a", encoding="utf-8") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DmlError(
            f"{folder / METRICS} cannot be written.",
            f"{error.strerror}. Earlier checkpoints are intact.",
            f"Make room, then continue: {command('train', '--resume', folder)}",
        ) from error


@cache
def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def environment(device: str, world: int) -> dict[str, Any]:
    """Where a run is computed, for environment.json."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "processes": world,
        "command": [without_secrets(word) for word in sys.argv],
        "git": _git(),
    }


def _git() -> dict[str, Any] | None:
    """The commit of the sources that run, if they are a working copy."""

    def output(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return found.stdout.strip()

    try:
        return {
            "commit": output("rev-parse", "HEAD"),
            "changed": bool(output("status", "--porcelain")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def draw_curves(folder: Path, records: Sequence[EpochRecord]) -> None:
    """curves.png: the loss with its parts, the monitored losses if any, and Recall@1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not records:
        return
    panels = {"loss": _series(records, ("loss", "parts"))}
    if any(record["monitor"] for record in records):
        panels["monitored losses"] = _series(records, ("loss", "monitor"))
    if any(record["scores"] for record in records):
        split = next(record["scores_of"] for record in records if record["scores"])
        recalls = panels[f"Recall@1 ({split})"] = _series(records, ("scores",))
        of_training = _series([r for r in records if r.get("train_scores")], ("train_scores",))
        for distance, curve in of_training.items():
            recalls[f"{distance}, training images"] = curve
        for distance, value in records[0].get("pixels", {}).items():
            ends = [records[0]["epoch"], records[-1]["epoch"]]
            recalls[f"{distance}, raw pixels"] = (ends, [value, value])
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for axes, (title, series) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name, (epochs, values) in series.items():
            axes.plot(epochs, values, label=name, marker="." if len(epochs) < 40 else "")
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with whole_file(folder / CURVES) as file:
        FigureCanvasAgg(figure).print_png(file)


def _series(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, tuple]:
    """Curves by name: a number under its own key, a table of numbers under theirs."""
    found: dict[str, tuple[list, list]] = {}
    for record in records:
        for key in keys:
            value = record[key]
            for name, number in (value if isinstance(value, dict) else {key: value}).items():
                epochs, values = found.setdefault(name, ([], []))
                epochs.append(record["epoch"])
                values.append(math.nan if number is None else number)
    return found
