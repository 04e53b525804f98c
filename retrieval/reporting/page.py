"""Write the view of a report as one HTML page that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from retrieval import metrics
from retrieval.distances import AXES, DISTANCES, NAMES
from retrieval.metrics import score_rows, title_of
from retrieval.number_format import as_text, counted, p_value, percent, points, points_interval
from retrieval.reporting import charts
from retrieval.results import LEAVE_ONE_OUT

if TYPE_CHECKING:
    from retrieval.reporting.view import ClassColumns, Compared, Run, View
    from retrieval.results import Difference, Result

FOLDER = Path(__file__).parent


def render(view: View) -> str:
    """The page; every text of the view is escaped, in the HTML and in the data for the script."""
    result = view["result"]
    distances = {d: NAMES[d] for d in DISTANCES if d in result["distances"]}
    histograms, spread = _histograms(view), _spread(view["classes"])
    known = {d: view["curve"][d] for d in DISTANCES if d in view["curve"]}
    page = (
        environment()
        .get_template("template.html")
        .render(
            view=view,
            sections=_sections(view, bool(histograms or spread)),
            **assets("theme.js", "map.js", "page.js"),
            data=Markup(embedded(view)),
            level=f"{100 * result['settings']['level']:g}%",
            distances=distances,
            sentence=sentence(result),
            leads=[_lead(result, d) for d in distances],
            facts=_facts(result),
            points=counted(len(view["map"]["x"]), "query", "queries") if view["map"] else "",
            scores=list(score_rows(result["distances"])),
            meanings=[(metric.title.format(k="K"), metric.help) for metric in metrics.METRICS],
            curve=charts.recall_curve(known) if known else None,
            histograms=histograms,
            spread=spread,
            recalls=_recalls(view["classes"]),
            comparisons=[(one, _tables(one)) for one in view["compare"]],
            training=_training(view["run"]),
            settings=[(k, as_text(v)) for k, v in result["settings"].items()],
            checks=[(k.replace("_", " "), v) for k, v in result["checks"].items()],
        )
    )
    return page.encode("utf-8", "replace").decode()  # a path may hold lone surrogates


def embedded(view: View) -> str:
    """JSON that is safe inside HTML, whatever its strings hold."""
    text = json.dumps(view, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text  # ASCII: U+2028 and U+2029 are escaped already


def sentence(result: Result) -> str:
    """Explain the protocol in a sentence."""
    queries, gallery = result["queries"], result["gallery"]
    if result["protocol"] == LEAVE_ONE_OUT:
        return (
            f"Leave-one-out: each item is a query against {counted(gallery - 1, 'other')}, and "
            "right when the nearest one is of its class."
        )
    return (
        f"Query to gallery: {counted(queries, 'query', 'queries')} against a gallery of "
        f"{counted(gallery, 'item')}. A query is right when the nearest item is of its class."
    )


def environment(*folders: Path) -> Environment:
    """Templates of some folders and of this one."""
    env = Environment(
        loader=FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["count"] = lambda n: f"{n:,}"
    return env


def assets(*scripts: str) -> dict[str, str]:
    """The style sheet and the scripts of a page, and the hash by which its policy allows these."""
    style, *parts = ((FOLDER / n).read_text(encoding="utf-8") for n in ("page.css", *scripts))
    script = "".join(parts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "style": Markup(style),
        "script": Markup(script),
        "script_hash": f"sha256-{digest}",
    }


def _sections(view: View, has_distances: bool) -> dict[str, str]:
    """Id and title of the sections that have something to show, in order."""
    known = {
        "numbers": ("Numbers", True),
        "rows": ("Retrieval", view["queries"]),
        "fails": ("Failures", view["classes"]["name"]),
        "distances": ("Distances", has_distances),
        "map": ("Map", view["map"]),
        "compare": ("Comparison", view["compare"]),
        "run": ("Training", view["run"]),
        "about": ("Provenance", True),
    }
    return {name: title for name, (title, there) in known.items() if there}


def _lead(result: Result, distance: str) -> dict[str, Any]:
    scores = result["distances"][distance]
    k = min(scores["recall"], key=int)
    span = scores["recall_ci"][k]
    return {
        "distance": distance,
        "name": NAMES[distance],
        "k": k,
        "value": percent(scores["recall"][k]),
        "span": span and [percent(x) for x in span],
    }


def _facts(result: Result) -> list[tuple[str, int]]:
    if result["protocol"] == LEAVE_ONE_OUT:
        sides = [("items", result["gallery"])]
    else:
        sides = [("queries", result["queries"]), ("gallery", result["gallery"])]
    return [*sides, ("classes", result["classes"]), ("dimensions", result["dim"])]


def _histograms(view: View) -> list[dict[str, Any]]:
    return [
        {
            "name": NAMES[d],
            "chart": charts.histogram(known, AXES[d]),
            "overlap": percent(known["overlap"], 1),
        }
        for d in DISTANCES
        if (known := view["histograms"].get(d))
    ]


def _spread(classes: ClassColumns) -> Markup | None:
    known = [gap for gap in classes["gap"] if gap is not None]
    return charts.scatter(classes["spread"], classes["gap"]) if len(known) > 1 else None


def _recalls(classes: ClassColumns) -> Markup | None:
    known = [recall for recall in classes["recall"] if recall is not None]
    return charts.recall_of_classes(known) if len(known) > 2 else None


def _tables(one: Compared) -> list[tuple[str, list[dict[str, Any]]]]:
    """The name of each distance, and the rows of its table."""
    return [
        (NAMES[d], _differences(one["distances"][d])) for d in DISTANCES if d in one["distances"]
    ]


def _differences(scores: dict[str, Difference]) -> list[dict[str, Any]]:
    shown = [x for s in scores.values() for x in [s["difference"], *(s["ci"] or [])]]
    ends = min(0, *shown), max(0, *shown)
    return [
        {
            "name": title_of(name),
            "theirs": percent(s["a"]),
            "ours": percent(s["b"]),
            "difference": points(s["difference"]),
            "span": points_interval(s["ci"]),
            "p": p_value(s["p"]),
            "verdict": _verdict(s["ci"]),
            "chart": charts.whisker(s["difference"], s["ci"], ends),
        }
        for name, s in scores.items()
    ]


def _verdict(span: list[float] | None) -> str:
    if span is None:
        return ""
    if span[0] > 0:
        return "better"
    return "worse" if span[1] < 0 else "unsure"


def _training(run: Run | None) -> list[dict[str, Any]]:
    """Charts of a run: the loss, its parts, monitored losses, recall."""
    if not run or not run["epochs"]:
        return []
    curves = run["lines"]
    # cos first: colours follow the order, and cos has the first one in all charts.
    recall = {NAMES[d]: curves.get(f"recall_{d}") for d in reversed(DISTANCES)}
    split = {"val": "Validation ", "test": "Test "}.get(run["scores_of"] or "", "")
    groups = {
        "Loss": {"loss": curves.get("loss")},
        "Parts of the loss": curves.get("parts") or {},
        "Monitored losses": curves.get("monitor") or {},
        f"{split}Recall@1, %": recall,
    }
    out = []
    for title, series in groups.items():
        known = {n: c for n, c in series.items() if c and any(v is not None for v in c)}
        if known:
            chart = charts.lines(run["epochs"], known, series is recall)
            out.append({"title": title, "names": list(known), "chart": chart})
    return out
