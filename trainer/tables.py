"""A run on the terminal, and its result as a table. Needs rich and no torch."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from retrieval.metrics import DISTANCES
from trainer.data.datasets.records import counted
from trainer.run.watch import Watch

BASELINES = {"pixels": "raw 8 x 8 pixels", "untrained": "before training"}
LOG = 120  # columns of a line where there is no terminal
QUIET = 10.0  # seconds between plain lines where there is no terminal


class Display(Watch):
    """A bar on a terminal, and a line for every epoch; elsewhere plain lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=10),
            TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[text]}"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("starting", total=None, text="", left="")
        self.width = console.width if console.is_terminal else LOG
        self.titles: list[str] = []
        self.epochs = 0
        self.began = (time.monotonic(), 0)  # of what is shown now, and how much was done then
        self.told = time.monotonic()

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        """A line of text: broken between words on a terminal, whole elsewhere."""
        self.console.print(escape(text), highlight=False, soft_wrap=not self.console.is_terminal)

    def stage(self, name: str, done: int, total: int) -> None:
        self._show(name, done, total, "")

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
        self._show(f"epoch {epoch}/{self.epochs}", done, total, text)

    def epoch(self, record: dict[str, Any]) -> None:
        if record["epoch"] == 0:
            for name, scores in (("pixels", "pixels"), ("untrained", "scores")):
                row = {"epoch": 0, "parts": {}, "scores": record[scores]}
                self._row(columns(row, self.width, BASELINES[name]))
            return
        best = record["best"] and record["scores"]
        self._row(columns(record, self.width, "best" if best else ""))

    def interrupted(self, folder: Path) -> None:
        self.bar.stop()
        if (folder / "last.pt").exists():
            command = f"dmltool train --resume {quote(str(folder))}"
            self._line(escape(f"Interrupted. Go on with: {command}"))  # not folded: to be copied
        else:
            self.note("Interrupted before the first epoch: nothing was written.")

    def _row(self, cells: dict[str, str]) -> None:
        """A line of the table; its titles first, and again where the parts of the loss change."""
        widths = {title: width_of(title) for title in cells}
        if list(cells) != self.titles:
            self.titles = list(cells)
            self._line(" ".join(title.rjust(width) for title, width in widths.items()), "bold")
        self._line(" ".join(cell.rjust(widths[title]) for title, cell in cells.items()))

    def _line(self, text: str, style: str = "") -> None:
        self.console.print(text.rstrip(), style=style, highlight=False, soft_wrap=True)

    def _show(self, name: str, done: int, total: int, text: str) -> None:
        task = self.bar.tasks[0]
        now = time.monotonic()
        if task.description != name and not (name.startswith("epoch") and self.epochs):
            self.bar.reset(self.task)
            self.began = (now, done)
        since, before = self.began
        left = ""
        if done > before:  # what lies between the steps, such as validation, counts
            left = f"{duration((now - since) * (total - done) / (done - before))} left"
        self.bar.update(
            self.task, description=name, completed=done, total=total, text=text, left=left
        )
        if not self.console.is_terminal and now - self.told > QUIET:
            self.told = now
            shown = ", ".join(part for part in (left and f"about {left}", text) if part)
            self.note(f"{name}: {100 * done // max(total, 1)}%, {shown}".rstrip(", "))


def columns(record: dict[str, Any], width: int, remark: str) -> dict[str, str]:
    """The cells of an epoch by title, as many as fit; speed and parts of the loss go first."""
    scores, parts = record["scores"], record["parts"]
    cells = {"epoch": str(record["epoch"]), "loss": fixed(record, "loss", 4)}
    if len(parts) > 1:
        cells |= {name: f"{value:.4f}" for name, value in parts.items()}
    shown = percent(scores) if scores else ["-"] * len(DISTANCES)
    cells |= dict(zip((f"R@1 {d} %" for d in DISTANCES), shown, strict=True))
    cells |= {"images/s": fixed(record, "images_per_second", 0), "s": fixed(record, "seconds", 0)}
    needed = len(max(BASELINES.values(), key=len)) + 1
    for title in ("images/s", "s", *reversed(parts)):
        if sum(width_of(name) + 1 for name in cells) + (needed if not parts else 5) <= width:
            break
        cells.pop(title, None)
    return cells | {"": remark}


def fixed(record: dict[str, Any], key: str, digits: int) -> str:
    """The number with so many digits; nothing where there is none."""
    return f"{record[key]:,.{digits}f}" if key in record else ""


def width_of(title: str) -> int:
    return {"": 0, "s": 5, "loss": 9, "epoch": 5}.get(title, max(len(title), 8))


def percent(scores: dict[str, float]) -> list[str]:
    return [f"{100 * scores[d]:.2f}" for d in DISTANCES]


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def result_table(result: dict[str, Any]) -> Group:
    """Recall of the best epoch; percent, as everywhere."""
    title = f"{result['run']}: epoch {result['best_epoch']} of {result['epochs']}"
    lines = [Text(title, style="bold", no_wrap=True)]
    lines += [
        Text(f"{split}: {counted(images, 'image')} of {counted(classes, 'class', 'classes')}")
        for split, (images, classes) in result.get("counts", {}).items()
        if split != "train"
    ]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in DISTANCES:
        table.add_column(f"{name} %", justify="right")
    select = result["select"]
    for name, scores in result["baselines"].items():
        table.add_row(f"Recall@1 ({select}, {BASELINES[name]})", *percent(scores))
    if result["scores"]:
        table.add_row(f"Recall@1 ({select}, picked the epoch)", *percent(result["scores"]))
    if result["test"]:
        found = result["test"]["distances"]
        for k in found["cos"]["recall"]:
            cells = percent({d: found[d]["recall"][k] for d in DISTANCES})
            table.add_row(f"Recall@{k} (test)", *cells)
        for name, key in (("MAP@R", "map_at_r"), ("R-precision", "r_precision")):
            table.add_row(f"{name} (test)", *percent({d: found[d][key] for d in DISTANCES}))
    return Group(*lines, table)
