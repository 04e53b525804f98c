"""Compare the settings of a sweep: means and spread over seeds, and tests of differences."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from retrieval import bootstrap
from retrieval.console import to_json
from retrieval.distances import DISTANCES
from retrieval.files import write_text
from retrieval.run_files import SWEEP, SWEEP_TABLE
from trainer import toml
from trainer.config import Config
from trainer.results import (
    FlatScores,
    Gap,
    Outcome,
    SettingResult,
    Spread,
    Spreads,
    SweepHead,
    SweepResult,
    Validation,
)
from trainer.run.scoring import flat

if TYPE_CHECKING:
    from trainer.sweep.study import Trials

T = TypeVar("T")
VERSION = 1
CRITERION = ("cos", "recall@1")
"""The distance and the score that order the settings."""


def gather(trials: Trials) -> SweepResult:
    """The settings of a sweep, best first, each with its runs and its difference to the best."""
    from trainer.sweep.study import ERROR, OUTCOMES

    rows = []
    for frozen in trials.all():
        if not frozen.state.is_finished() or (not frozen.params and trials.plan.space):
            continue
        runs = frozen.user_attrs.get(OUTCOMES, [])
        values = {key: text_of(frozen.params[key]) for key in trials.plan.space}
        rows.append(setting(frozen.number, values, runs, frozen.user_attrs.get(ERROR)))
    plan = trials.plan
    about: SweepHead = {
        "name": trials.folder.name,
        "method": plan.method,
        "trials": plan.trials,
        "settings": plan.config().to_dict(),
    }
    return compared(rows, list(plan.space), about)


def text_of(value: Any) -> str:
    """A value of Optuna as TOML; choices are that already."""
    return value if isinstance(value, str) else toml.render(value)


def setting(
    number: int, values: dict[str, str], runs: list[Outcome], error: str | None = None
) -> SettingResult:
    """A setting with the means and standard deviations of its scores over the seeds."""
    return {
        "trial": number,
        "values": values,
        "error": error,
        "runs": runs,
        "validation": spread([run["validation"]["scores"] for run in runs if run["validation"]]),
        "test": None,
        "difference": None,
    }


def spread(runs: Sequence[FlatScores]) -> Spreads | None:
    """Mean and standard deviation of every score over runs, by distance and name."""
    if not runs:
        return None
    return {
        d: {
            name: mean_and_std([run[d][name] for run in runs])
            for name in runs[0][d]
            if isinstance(runs[0][d][name], float)
        }
        for d in runs[0]
    }


def criterion(scores: Mapping[str, Mapping[str, T]]) -> T:
    """The one of the scores, by distance and name, that orders the settings."""
    d, name = CRITERION
    return scores[d][name]


def mean_of(row: SettingResult) -> Spread:
    """Mean and standard deviation of the score that orders the settings."""
    assert row["validation"] is not None, "else it has no place in the order"
    return criterion(row["validation"])


def validation_of(run: Outcome) -> Validation:
    """The validation scores of a run whose setting is compared with others."""
    assert run["validation"] is not None, "a sweep needs a split that picks the epoch"
    return run["validation"]


def recall_of(run: Outcome) -> float:
    """The validation score of a run that orders the settings."""
    return criterion(validation_of(run)["scores"])


def mean_and_std(values: Sequence[float]) -> Spread:
    """The mean, and the standard deviation of a sample; None for one value."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std}


def compared(rows: list[SettingResult], parameters: list[str], about: SweepHead) -> SweepResult:
    """The result of a sweep: its settings in order, and the tests against the first."""
    good = [row for row in rows if row["validation"]]
    good.sort(key=lambda row: (-mean_of(row)["mean"], row["trial"]))
    for row in good[1:]:
        row["difference"] = difference(good[0]["runs"], row["runs"])
    ordered = good + [row for row in rows if not row["validation"]]
    return {
        "version": VERSION,
        **about,
        "parameters": parameters,
        "seeds": [run["seed"] for row in ordered[:1] for run in row["runs"]],
        "split": validation_of(good[0]["runs"][0])["split"] if good else None,
        "rows": ordered,
    }


def difference(best: list[Outcome], other: list[Outcome]) -> Gap | None:
    """Recall@1 (cos) of a setting less that of the best, tested over seeds and classes together.

    None if the two have other validation classes or seeds.
    """
    a, b = (list(map(validation_of, runs)) for runs in (other, best))
    drawn = (a[0]["classes"], a[0]["queries"])
    if any((run["classes"], run["queries"]) != drawn for run in (*a, *b)):
        return None
    if [run["seed"] for run in best] != [run["seed"] for run in other]:
        return None
    hits = [np.array([run["hits"][CRITERION[0]] for run in runs]) for runs in (a, b)]
    found, span, p = bootstrap.paired_runs(hits[0] - hits[1], np.array(a[0]["queries"]))
    known = not np.isnan(p)
    return {"difference": found, "ci": list(span) if known else None, "p": p if known else None}


def of_seeds(outcomes: list[Outcome], name: str, config: Config) -> SweepResult:
    """The result of one setting: the simplest sweep. Without validation there is only the test."""
    row = setting(0, {}, outcomes)
    add_test(row, outcomes)
    settings = config.to_dict()
    about: SweepHead = {"name": name, "method": "seeds", "trials": 1, "settings": settings}
    found = compared([row], [], about)
    found["split"] = config.run.select
    return found


def add_test(row: SettingResult, runs: list[Outcome] | None) -> None:
    """Give a setting the test scores of its runs, where they are known."""
    tests = [run["test"] for run in runs or () if run["test"] is not None]
    if not runs or len(tests) < len(runs):
        return
    row["runs"] = runs
    row["test"] = spread([flat(test) for test in tests])


def write(found: SweepResult, folder: Path) -> None:
    """Write sweep.json and sweep.csv."""
    write_text(folder / SWEEP, to_json(found), force=True)
    write_text(folder / SWEEP_TABLE, to_csv(found), force=True)


def to_csv(found: SweepResult) -> str:
    """One line for a setting: its values, means and standard deviations, the difference and p."""
    lines: list[dict[str, Any]] = []
    for rank, row in enumerate(found["rows"], 1):
        line: dict[str, Any] = {"rank": rank, "trial": row["trial"], **row["values"]}
        line |= {"seeds": len(row["runs"]), "error": row["error"]}
        for part in ("validation", "test"):
            line |= dict(_cells(part, row[part] or {}))
        tested = row["difference"] or {"difference": None, "ci": None, "p": None}
        low, high = tested["ci"] or (None, None)
        line |= {"difference": tested["difference"], "low": low, "high": high, "p": tested["p"]}
        lines.append(line)
    names = dict.fromkeys(name for line in lines for name in line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _cells(part: str, scores: Spreads) -> Iterable[tuple[str, float | None]]:
    for d in DISTANCES:
        for name, value in scores.get(d, {}).items():
            for kind in ("mean", "std"):
                yield f"{part} {d} {name} {kind}", value[kind]
