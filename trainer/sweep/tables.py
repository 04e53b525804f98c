"""Show a sweep while it trains, and its settings as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from retrieval.console import ProgressBar, safe_console
from retrieval.metrics import DISTANCES, title_of
from retrieval.number_format import counted, four_digits, p_value, percent, points, points_interval
from trainer.sweep.results import CRITERION, mean_and_std
from trainer.sweep.runs import Outcome, SweepWatch

SHOWN = 20  # settings in the table; the files have all
COLUMNS = (("cos", "recall@1"), ("l2", "recall@1"), ("cos", "map_at_r"))


class SweepDisplay(SweepWatch):
    """A progress bar for the run that is being trained, and a line for every trial, on stderr."""

    def __init__(self, console: Console | None = None, quiet: float = 60.0) -> None:
        self.console = console or safe_console(stderr=True)
        self.bar = ProgressBar(self.console, delay=0.0, quiet=quiet)
        self.name, self.epochs = "", 0

    def __enter__(self) -> SweepDisplay:
        self.bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def trial(self, number: int, trials: int, values: dict[str, str]) -> None:
        self.name = f"trial {number + 1}/{trials}"

    def begin(self, folder: Path, epochs: int, steps: int, epoch: int) -> None:
        self.epochs, self.folder = epochs, folder

    def step(self, epoch: int, step: int, steps: int, values: dict[str, float]) -> None:
        name = f"{self.name} {self.folder.name}".strip()
        self.bar(name, (epoch - 1) * steps + step, self.epochs * steps)

    def trained(self, values: dict[str, str], outcomes: list[Outcome] | str) -> None:
        where = short(values)
        if isinstance(outcomes, str):
            self.line(f"{self.name} {where}: {outcomes}")
            return
        d, name = CRITERION
        scores = [run["validation"]["scores"][d][name] for run in outcomes]
        shown = with_spread(mean_and_std(scores))
        self.line(f"{self.name} {where}: {title_of(name)} ({d}) {shown} %")

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def short(values: dict[str, str]) -> str:
    """The values by the last part of their keys: anchors=1 images=4."""
    return " ".join(f"{last(key)}={four_digits(text)}" for key, text in values.items())


def last(key: str) -> str:
    return key.rpartition(".")[2]


def with_spread(value: dict[str, float | None]) -> str:
    """97.31 ± 0.42; without a spread for one value."""
    spread = "" if value["std"] is None else f" ± {percent(value['std'])}"
    return percent(value["mean"]) + spread


def sweep_table(found: dict[str, Any]) -> Group:
    """The settings, best first; percent, as everywhere."""
    count, seeds = len(found["rows"]), counted(len(found["seeds"]), "seed")
    settings = counted(count, "setting")
    title = f"{found['name']}: {settings}, {seeds} each, scores of {found['split']}"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", justify="right")
    for key in found["parameters"]:
        table.add_column(last(key), justify="right", overflow="fold")
    for d, name in COLUMNS:
        table.add_column(f"{title_of(name)} {d} %", justify="right")
    table.add_column("less the best", justify="right")
    table.add_column("p", justify="right")
    for rank, row in enumerate(found["rows"][:SHOWN], 1):
        values = map(four_digits, row["values"].values())
        table.add_row(str(rank), *values, *_scores(row), *_difference(row))
    parts: list[Any] = [Text(title, style="bold", no_wrap=True), table]
    if count > SHOWN:
        parts.append(Text(f"{count - SHOWN} more settings in sweep.csv"))
    best = found["rows"][0] if found["rows"] else None
    if best and best["test"]:
        parts.append(Text("Test set, the first setting:", style="bold"))
        parts.append(scores_table(best["test"]))
    return Group(*parts)


def seeds_table(found: dict[str, Any]) -> Group:
    """Mean and spread of one setting over its seeds."""
    seeds, [row] = found["seeds"], found["rows"]
    title = f"{found['name']}: mean and standard deviation of seeds {seeds[0]} to {seeds[-1]}"
    parts: list[Any] = [Text(title, style="bold", no_wrap=True)]
    for name, scores in ((found["split"], row["validation"]), ("test", row["test"])):
        if scores:
            parts += [Text(f"{name}:"), scores_table(scores)]
    return Group(*parts)


def _scores(row: dict[str, Any]) -> list[str]:
    if not row["runs"]:
        return ["failed", *[""] * (len(COLUMNS) - 1)]
    return [with_spread(row["validation"][d][name]) for d, name in COLUMNS]


def _difference(row: dict[str, Any]) -> tuple[str, str]:
    tested = row["difference"]
    if not tested:
        return "", ""
    shown = f"{points(tested['difference'])} ({points_interval(tested['ci'])})"
    return shown, p_value(tested["p"])


def scores_table(scores: dict[str, dict[str, Any]]) -> Table:
    """Mean and spread over seeds of every score, by distance."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    shown = [d for d in DISTANCES if d in scores]
    for d in shown:
        table.add_column(f"{d} %", justify="right")
    for name in scores[shown[0]]:
        table.add_row(title_of(name), *(with_spread(scores[d][name]) for d in shown))
    return table
