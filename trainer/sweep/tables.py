"""Show a sweep while it trains, and its settings as a table."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from retrieval.console import safe_console
from retrieval.distances import DISTANCES
from retrieval.metrics import title_of
from retrieval.number_format import counted, four_digits, p_value, percent, points, points_interval
from trainer.results import Outcome, SettingResult, Spread, Spreads, SweepResult
from trainer.sweep.results import CRITERION, mean_and_std, recall_of
from trainer.sweep.runs import SweepWatch
from trainer.tables import OnStderr, by_distance

SHOWN = 20  # settings in the table; the files have all
SPREAD = len("100.00 ± 0.00")  # stays on one line
COLUMNS = (("cos", "recall@1"), ("l2", "recall@1"), ("cos", "map_at_r"))


class SweepDisplay(OnStderr, SweepWatch):
    """A progress bar for the run that is being trained, and a line for every trial, on stderr."""

    def __init__(self) -> None:
        super().__init__(safe_console(stderr=True), quiet=60.0)
        self.name = ""

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
        shown = with_spread(mean_and_std(list(map(recall_of, outcomes))))
        self.line(f"{self.name} {where}: {title_of(name)} ({d}) {shown} %")


def short(values: dict[str, str]) -> str:
    """The values by the last part of their keys: anchors=1 images=4."""
    return " ".join(f"{last(key)}={four_digits(text)}" for key, text in values.items())


def last(key: str) -> str:
    return key.rpartition(".")[2]


def with_spread(value: Spread) -> str:
    """97.31 ± 0.42; without a spread for one value."""
    spread = "" if value["std"] is None else f" ± {percent(value['std'])}"
    return percent(value["mean"]) + spread


def sweep_table(found: SweepResult, console: Console) -> Group:
    """The settings, best first, with as many scores as fit the console; percent, as everywhere."""
    count, seeds = len(found["rows"]), counted(len(found["seeds"]), "seed")
    settings = counted(count, "setting")
    title = f"{found['name']}: {settings}, {seeds} each, scores of {found['split']}"
    tables = [_settings_table(found, shown) for shown in range(len(COLUMNS), 0, -1)]
    unlimited = console.options.update(max_width=1000)
    least = [console.measure(table, options=unlimited).minimum for table in tables]
    fitting = [t for t, width in zip(tables, least, strict=True) if width <= console.width]
    table = (fitting or tables[-1:])[0]
    parts: list[Any] = [Text(title, style="bold", no_wrap=True), table]
    if count > SHOWN:
        parts.append(Text(f"{count - SHOWN} more settings in sweep.csv"))
    if table is not tables[0]:
        parts.append(Text("More scores in sweep.csv; a wider terminal shows them here."))
    best = found["rows"][0] if found["rows"] else None
    if best and best["test"]:
        parts.append(Text("Test set, the best setting:", style="bold"))
        parts.append(scores_table(best["test"]))
    return Group(*parts)


def _settings_table(found: SweepResult, shown: int) -> Table:
    """The settings with the first scores of COLUMNS."""
    values = [Column(last(key), overflow="fold") for key in found["parameters"]]
    scored = [Column(f"{title_of(name)} {d} %", min_width=SPREAD) for d, name in COLUMNS[:shown]]
    table = Table("", *values, *scored, "vs. best", "p", box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for rank, row in enumerate(found["rows"][:SHOWN], 1):
        cells = texts(row)
        scores = cells["scores"][:shown] or ["failed", *[""] * (shown - 1)]
        difference = f"{cells['difference']} ({cells['span']})" if row["difference"] else ""
        table.add_row(str(rank), *cells["values"], *scores, difference, cells["p"])
    return table


def seeds_table(found: SweepResult) -> Group:
    """Mean and spread of one setting over its seeds."""
    seeds, [row] = found["seeds"], found["rows"]
    title = f"{found['name']}: mean and standard deviation of seeds {seeds[0]} to {seeds[-1]}"
    parts: list[Any] = [Text(title, style="bold", no_wrap=True)]
    for name, scores in ((found["split"], row["validation"]), ("test", row["test"])):
        if scores:
            parts += [Text(f"{name}:"), scores_table(scores)]
    return Group(*parts)


def texts(row: SettingResult) -> dict[str, Any]:
    """A setting as text: its values, scores, and its difference to the best with interval and p."""
    tested, scores = row["difference"], row["validation"]
    return {
        "values": [four_digits(text) for text in row["values"].values()],
        "scores": [with_spread(scores[d][name]) for d, name in COLUMNS] if scores else [],
        "difference": points(tested["difference"]) if tested else "",
        "span": points_interval(tested["ci"]) if tested else "",
        "p": p_value(tested["p"]) if tested else "",
    }


def all_scores(scores: Spreads) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The distances, and every score by title with its mean and spread in each of them."""
    shown = [d for d in DISTANCES if d in scores]
    names = scores[shown[0]]
    rows = [(title_of(name), [with_spread(scores[d][name]) for d in shown]) for name in names]
    return shown, rows


def scores_table(scores: Spreads) -> Table:
    """Mean and spread over seeds of every score, by distance."""
    return by_distance(*all_scores(scores))
