"""Write the result of a sweep as one HTML page that works offline, without a script."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from retrieval.metrics import DISTANCES, title_of
from retrieval.number_format import four_digits, p_value, percent, points, points_interval
from retrieval.reporting import charts as report_charts
from retrieval.reporting.page import FOLDER as REPORT
from trainer import toml
from trainer.sweep import charts
from trainer.sweep.results import CRITERION
from trainer.sweep.tables import COLUMNS, with_spread

PAGE = "sweep.html"


def render(found: dict[str, Any]) -> str:
    """The page; every text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    good = [row for row in found["rows"] if row["validation"]]
    spans = [span for row in good[1:] for span in _span(row)]
    ends = (min([0.0, *spans]), max([0.0, *spans]))
    best = good[0] if good else None
    drawn = charts.chart(found)
    return environment.get_template("page.html").render(
        found=found,
        wide=drawn is not None and f"0 0 {charts.WIDE} " in drawn,
        version=version("dmltool"),
        style=Markup((REPORT / "page.css").read_text(encoding="utf-8")),
        best=best,
        lead=with_spread(best["validation"][CRITERION[0]][CRITERION[1]]) if best else "",
        chart=drawn,
        titles=[f"{title_of(name)} {d}" for d, name in COLUMNS],
        rows=[_row(n, row, ends) for n, row in enumerate(found["rows"], 1)],
        test=_test(best["test"]) if best and best["test"] else None,
        distances=[d for d in DISTANCES if best and best["test"] and d in best["test"]],
        settings=toml.render_tables(found["settings"]),
    )


def _span(row: dict[str, Any]) -> list[float]:
    tested = row["difference"]
    return [] if not tested else [tested["difference"], *(tested["ci"] or ())]


def _row(rank: int, row: dict[str, Any], ends: tuple[float, float]) -> dict[str, Any]:
    tested = row["difference"]
    return {
        "rank": rank,
        "values": [four_digits(text) for text in row["values"].values()],
        "error": row["error"],
        "scores": [with_spread(row["validation"][d][name]) for d, name in COLUMNS]
        if row["validation"]
        else [],
        "runs": ", ".join(
            f"seed {run['seed']}: {percent(charts.run_score(run))}"
            for run in row["runs"]
            if run["validation"]
        ),
        "difference": points(tested["difference"]) if tested else "",
        "span": points_interval(tested["ci"]) if tested else "",
        "p": p_value(tested["p"]) if tested else "",
        "whisker": report_charts.whisker(tested["difference"], tested["ci"], ends)
        if tested
        else "",
    }


def _test(scores: dict[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    shown = [d for d in DISTANCES if d in scores]
    names = scores[shown[0]]
    return [(title_of(name), [with_spread(scores[d][name]) for d in shown]) for name in names]
