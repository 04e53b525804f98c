"""Show a run while it trains, and its result as a table."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from retrieval import signals
from retrieval.console import ProgressBar
from retrieval.distances import DISTANCES
from retrieval.errors import command
from retrieval.metrics import score_rows, title_of
from retrieval.number_format import counted, percent
from retrieval.run_files import LAST
from retrieval.tables import number_table
from trainer.results import BASELINES, EpochRecord, Recalls, RunResult
from trainer.run.watch import Watch

LOG = 120  # columns of a line where there is no terminal


class OnStderr:
    """A progress bar, and lines above it; a plain line of progress every `quiet` seconds."""

    def __init__(self, console: Console, quiet: float) -> None:
        self.console = console
        self.bar = ProgressBar(console, delay=0.0, quiet=quiet)
        self.epochs = 0

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def line(self, text: str, style: str = "") -> None:
        self.console.print(
            text.rstrip(), style=style, markup=False, highlight=False, soft_wrap=True
        )


class Display(OnStderr, Watch):
    """A progress bar, and a line for every epoch, on stderr."""

    def __init__(self, console: Console, quiet: float = 10.0) -> None:
        super().__init__(console, quiet)
        self.width = console.width if console.is_terminal else LOG
        self.titles: list[str] = []
        self.began = (0.0, 0)  # when the first epoch began, and how many steps were done then

    def note(self, text: str) -> None:
        """A line of text: broken between words on a terminal, whole elsewhere."""
        whole = not self.console.is_terminal
        self.console.print(text, markup=False, highlight=False, soft_wrap=whole)

    def stage(self, name: str, done: int, total: int) -> None:
        self.bar(name, done, total)

    def begin(self, folder: Path, epochs: int, steps: int, epoch: int) -> None:
        self.epochs = epochs
        where = f" from epoch {epoch + 1}" if epoch else ""
        self.note(f"{counted(epochs, 'epoch')} of {counted(steps, 'step')}{where} in {folder}")
        self.began = (time.monotonic(), epoch * steps)

    def step(self, epoch: int, step: int, steps: int, values: dict[str, float]) -> None:
        text = f"loss {values['loss']:.4g}"
        if self.width >= 72 or not self.console.is_terminal:
            text += f" · {values['images_per_second']:,.0f} images/s"
        done, total = (epoch - 1) * steps + step, self.epochs * steps
        # What lies between the steps, such as validation, counts for the time left.
        self.bar(f"epoch {epoch}/{self.epochs}", done, total, text, self.began)

    def epoch(self, record: EpochRecord) -> None:
        if record["epoch"] == 0:
            for name, scores in (("pixels", record["pixels"]), ("untrained", record["scores"])):
                row = {"epoch": 0, "parts": {}, "scores": scores}
                self._row(columns(row, self.width, BASELINES[name]))
            return
        best = record["best"] and record["scores"]
        self._row(columns(record, self.width, "best" if best else ""))

    def _row(self, cells: dict[str, str]) -> None:
        """A line of the table; its titles first, and again where the parts of the loss change."""
        widths = {title: width_of(title) for title in cells}
        if list(cells) != self.titles:
            self.titles = list(cells)
            self.line(" ".join(title.rjust(width) for title, width in widths.items()), "bold")
        self.line(" ".join(cell.rjust(widths[title]) for title, cell in cells.items()))


def how_to_continue(folder: Path) -> str:
    """What to say of a run on Ctrl-C: the command that continues it, if there is a checkpoint."""
    if not (folder / LAST).exists():
        return signals.NOTHING
    return f"`{command('train', '--resume', folder)}` continues"


def columns(record: Mapping[str, Any], width: int, remark: str) -> dict[str, str]:
    """The cells of an epoch by title, as many as fit; speed and parts of the loss go first."""
    scores, parts = record["scores"], record["parts"]
    cells = {"epoch": str(record["epoch"]), "loss": fixed(record, "loss", 4)}
    if len(parts) > 1:
        cells |= {name: f"{value:.4f}" for name, value in parts.items()}
    shown = recalls(scores) if scores else ["-"] * len(DISTANCES)
    cells |= dict(zip((f"R@1 {d} %" for d in DISTANCES), shown, strict=True))
    cells |= {"images/s": fixed(record, "images_per_second", 0), "s": fixed(record, "seconds", 0)}
    needed = len(max(BASELINES.values(), key=len)) + 1
    for title in ("images/s", "s", *reversed(parts)):
        if sum(width_of(name) + 1 for name in cells) + (needed if not parts else 5) <= width:
            break
        cells.pop(title, None)
    return cells | {"": remark}


def fixed(record: Mapping[str, Any], key: str, digits: int) -> str:
    """The number with so many digits; nothing where there is none."""
    return f"{record[key]:,.{digits}f}" if key in record else ""


def width_of(title: str) -> int:
    return {"": 0, "s": 5, "loss": 9, "epoch": 5}.get(title, max(len(title), 8))


def recalls(scores: Recalls) -> list[str]:
    """Percent by distance, in the order of the columns."""
    return [percent(scores[d]) for d in DISTANCES]


def result_table(result: RunResult) -> Group:
    """Recall of the best epoch; percent, as everywhere."""
    title = f"{result['run']}: epoch {result['best_epoch']} of {result['epochs']}"
    lines = [Text(title, style="bold", no_wrap=True)]
    lines += [
        Text(f"{split}: {counted(images, 'image')} of {counted(classes, 'class', 'classes')}")
        for split, (images, classes) in result.get("counts", {}).items()
        if split != "train"
    ]
    compared = {BASELINES[name]: scores for name, scores in result["baselines"].items()}
    if result["scores"]:
        compared["best epoch"] = result["scores"]
    recall = title_of("recall@1")
    rows = [(f"{recall} ({result['select']}, {of})", recalls(s)) for of, s in compared.items()]
    if result["test"]:
        tested = score_rows(result["test"]["distances"])
        rows += [(f"{title} (test)", [score.value for score in each]) for title, each in tested]
    return Group(*lines, *([by_distance(DISTANCES, rows)] if rows else []))


def by_distance(distances: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> Table:
    """Scores in percent: a row for each title, a column for each distance."""
    table = number_table("", *(f"{d} %" for d in distances))
    for title, cells in rows:
        table.add_row(title, *cells)
    return table
