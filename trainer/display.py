"""A run on the terminal, and its result as a table. Needs rich and no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from retrieval.metrics import DISTANCES
from trainer.watch import Watch

WIDTHS = (5, 9, 30, 8, 8, 9, 6)
QUIET = 10.0  # seconds between plain lines where there is no terminal


class Display(Watch):
    """A bar on a terminal, and a line for every epoch; elsewhere plain lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(), TextColumn("left"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("starting", total=None, text="")
        self.headed = False
        self.epochs = 0
        self.told = time.monotonic()

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        self.console.print(escape(text), highlight=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int) -> None:
        self._show(name, done, total, "")

    def begin(self, folder: Path, epochs: int, steps: int, epoch: int) -> None:
        self.epochs = epochs
        where = f" from epoch {epoch + 1}" if epoch else ""
        many = "epoch" if epochs == 1 else "epochs"
        self.note(f"{epochs} {many} of {steps:,} steps{where} in {folder}")

    def step(self, epoch: int, step: int, steps: int, values: dict[str, float]) -> None:
        shown = {k: v for k, v in values.items() if k != "images_per_second"}
        text = " ".join(f"{name} {value:.4g}" for name, value in shown.items())
        text += f" · {values['images_per_second']:,.0f} images/s"
        done, total = (epoch - 1) * steps + step, self.epochs * steps
        self._show(f"epoch {epoch}/{self.epochs}", done, total, text)

    def epoch(self, record: dict[str, Any]) -> None:
        if not self.headed:
            titles = (
                "epoch",
                "loss",
                "parts",
                *(f"R@1 {d}" for d in DISTANCES),
                "images/s",
                "s",
                "",
            )
            self._line(titles, "bold")
            self.headed = True
        if record["epoch"] == 0:
            for name, scores in (("raw 8 x 8 pixels", "pixels"), ("before training", "scores")):
                cells = (f"{100 * record[scores][d]:.2f}" for d in DISTANCES)
                self._line(("0", "", name, *cells, "", "", ""))
            return
        scores = record["scores"]
        parts = " ".join(f"{name} {value:.4g}" for name, value in record["parts"].items())
        self._line(
            (
                str(record["epoch"]),
                f"{record['loss']:.4f}",
                parts,
                *(f"{100 * scores[d]:.2f}" if scores else "-" for d in DISTANCES),
                f"{record['images_per_second']:,.0f}",
                f"{record['seconds']:.0f}",
                "best" if record["best"] and scores else "",
            )
        )

    def interrupted(self, folder: Path) -> None:
        self.bar.stop()
        if (folder / "last.pt").exists():
            self.note(f"Interrupted. Go on with: dmltool train --resume {folder}")
        else:
            self.note("Interrupted before the first epoch: nothing was written.")

    def _line(self, cells: tuple[str, ...], style: str = "") -> None:
        text = " ".join(
            cell.ljust(width) if place == 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, (*WIDTHS, 0), strict=True))
        )
        self.console.print(text.rstrip(), style=style, highlight=False, soft_wrap=True)

    def _show(self, name: str, done: int, total: int, text: str) -> None:
        task = self.bar.tasks[0]
        if task.description != name and not (name.startswith("epoch") and self.epochs):
            self.bar.reset(self.task)
        self.bar.update(self.task, description=name, completed=done, total=total, text=text)
        now = time.monotonic()
        if not self.console.is_terminal and now - self.told > QUIET:
            self.told = now
            self.note(f"{name}: {100 * done // max(total, 1)}% {text}".rstrip())


def result_table(result: dict[str, Any]) -> Group:
    """Recall of the best epoch; percent, as everywhere."""
    title = f"{result['run']}: epoch {result['best_epoch']} of {result['epochs']}"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in DISTANCES:
        table.add_column(name, justify="right")
    titles = {"pixels": "raw 8 x 8 pixels", "untrained": "before training"}
    for name, scores in result["baselines"].items():
        cells = (f"{100 * scores[d]:.2f}" for d in DISTANCES)
        table.add_row(f"Recall@1 ({result['select']}, {titles[name]})", *cells)
    if result["scores"]:
        cells = (f"{100 * result['scores'][d]:.2f}" for d in DISTANCES)
        table.add_row(f"Recall@1 ({result['select']}, picked the epoch)", *cells)
    if result["test"]:
        found = result["test"]["distances"]
        for k in found["cos"]["recall"]:
            cells = (f"{100 * found[d]['recall'][k]:.2f}" for d in DISTANCES)
            table.add_row(f"Recall@{k} (test)", *cells)
        for name, key in (("MAP@R", "map_at_r"), ("R-precision", "r_precision")):
            cells = (f"{100 * found[d][key]:.2f}" for d in DISTANCES)
            table.add_row(f"{name} (test)", *cells)
    return Group(Text(title, style="bold", no_wrap=True), table)
