"""Write the view of a report as one HTML page that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from retrieval import metrics
from retrieval.metrics import DISTANCES, score_rows, title_of
from retrieval.number_format import p_value, percent, points, points_interval
from retrieval.reporting import charts
from retrieval.reporting.view import Compared, Run, View
from retrieval.results import Difference, Result

FOLDER = Path(__file__).parent
SCRIPTS = ("map.js", "page.js")
NAMES = {"l2": "Euclidean", "cos": "cosine"}
AXES = {"cos": "cosine similarity", "l2": "Euclidean distance"}


def render(view: View) -> str:
    """The page; every text of the view is escaped, in the HTML and in the data for the script."""
    script = "".join(_asset(name) for name in SCRIPTS)
    result = view["result"]
    page = (
        _environment()
        .get_template("template.html")
        .render(
            view=view,
            sections=_sections(view),
            style=Markup(_asset("page.css")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            data=Markup(embedded(view)),
            level=f"{100 * result['settings'].get('level', 0.95):g}%",
            distances=_distances(result),
            sentence=sentence(result),
            leads=[_lead(result, d) for d in DISTANCES if d in result["distances"]],
            facts=_facts(result),
            scores=_scores(result),
            meanings=[(metric.title.format(k="K"), metric.help) for metric in metrics.METRICS],
            curve=_curve(view),
            histograms=_histograms(view),
            spread=_spread(view),
            recalls=_recalls(view),
            comparisons=[_comparison(one) for one in view.get("compare") or []],
            training=_training(view.get("run")),
            checks=[(k.replace("_", " "), v) for k, v in result["checks"].items() if v is not None],
        )
    )
    return page.encode("utf-8", "replace").decode()  # a path may hold lone surrogates


def embedded(view: View) -> str:
    """JSON that no HTML parser reads anything into, whatever its strings hold."""
    text = json.dumps(view, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text  # ASCII: U+2028 and U+2029 are escaped already


def sentence(result: Result) -> str:
    """The protocol, for a reader who does not know the word."""
    queries, gallery = result["queries"], result["gallery"]
    if result["protocol"] == "leave-one-out":
        who = "Each item" if queries == gallery else f"Each of {queries:,} items drawn at random"
        return (
            f"Leave-one-out: {who[0].lower()}{who[1:]} is a query against the {gallery - 1:,} "
            "others, and right when the nearest one is of its class."
        )
    return (
        f"Query to gallery: {queries:,} queries each search a gallery of {gallery:,} items, and "
        "are right when the nearest one is of their class."
    )


def _asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _environment() -> Environment:
    env = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["count"] = lambda n: f"{n:,}"
    return env


def _sections(view: View) -> dict[str, str]:
    """Id and title of the sections that have something to show, in order."""
    has_classes, plane = bool(view["classes"]["name"]), view.get("map")
    known = {
        "numbers": ("Numbers", True),
        "rows": ("Retrieval", bool(view.get("queries"))),
        "fails": (
            "Failures",
            has_classes or bool(view.get("confused")) or bool(view.get("duplicates")),
        ),
        "distances": ("Distances", bool(_histograms(view)) or _spread(view) is not None),
        "map": ("Map", bool(plane and plane["x"])),
        "compare": ("Comparison", bool(view.get("compare"))),
        "run": ("Training", bool(view.get("run"))),
        "about": ("Provenance", True),
    }
    return {name: title for name, (title, there) in known.items() if there}


def _distances(result: Result) -> dict[str, str]:
    return {d: NAMES[d] for d in DISTANCES if d in result["distances"]}


def _lead(result: Result, distance: str) -> dict[str, Any]:
    scores = result["distances"][distance]
    k = min(scores["recall"], key=int)
    span = (scores.get("recall_ci") or {}).get(k)
    return {
        "distance": distance,
        "name": NAMES[distance],
        "k": k,
        "value": percent(scores["recall"][k]),
        "span": span and [percent(x) for x in span],
    }


def _facts(result: Result) -> list[tuple[str, int]]:
    if result["protocol"] == "leave-one-out":
        sides = [("items", result["gallery"])]
        if result["queries"] != result["gallery"]:
            sides.append(("queries", result["queries"]))
    else:
        sides = [("queries", result["queries"]), ("gallery", result["gallery"])]
    return [*sides, ("classes", result["classes"]), ("dimensions", result["dim"])]


def _scores(result: Result) -> list[dict[str, Any]]:
    """Rows of the table: a name and, for each distance, value and interval."""
    rows = score_rows(result["distances"])
    return [{"name": title, "cells": [score._asdict() for score in row]} for title, row in rows]


def _curve(view: View) -> Markup | None:
    curve = view.get("curve") or {}
    known = {d: curve[d] for d in DISTANCES if d in curve and curve[d]["k"]}
    return charts.recall_curve(known) if known else None


def _histograms(view: View) -> list[dict[str, Any]]:
    known = view.get("histograms") or {}
    return [
        {
            "distance": d,
            "name": NAMES[d],
            "chart": charts.histogram(known[d], AXES[d]),
            "overlap": percent(known[d].get("overlap"), 1),
        }
        for d in DISTANCES
        if known.get(d) and len(known[d]["edges"]) > 1
    ]


def _spread(view: View) -> Markup | None:
    classes = view["classes"]
    spread, gap = classes.get("spread") or [], classes.get("gap") or []
    pairs = [1 for s, g in zip(spread, gap, strict=False) if s is not None and g is not None]
    return charts.scatter(spread, gap) if len(pairs) > 1 else None


def _recalls(view: View) -> Markup | None:
    recall = view["classes"].get("recall") or []
    known = [r for r in recall if r is not None]
    return charts.recall_of_classes(known) if len(known) > 2 else None


def _comparison(one: Compared) -> dict[str, Any]:
    tables = []
    for d in DISTANCES:
        if scores := one["distances"].get(d):
            tables.append({"name": NAMES[d], "rows": _differences(scores)})
    return {
        "file": one["file"],
        "tables": tables,
        "gained": one.get("gained"),
        "lost": one.get("lost"),
    }


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
    """Charts of a run: the loss, its parts, what was watched, recall."""
    if not run or not run["epochs"]:
        return []
    curves = run["lines"]
    recall = {NAMES[d]: curves.get(f"recall_{d}") for d in DISTANCES}
    split = {"val": "Validation ", "test": "Test "}.get(run.get("scores_of") or "", "")
    groups = [
        ("Loss", {"loss": curves.get("loss")}, False),
        ("Parts of the loss", curves.get("parts") or {}, False),
        ("Watched, not trained on", curves.get("monitor") or {}, False),
        (f"{split}Recall@1, %", recall, True),
    ]
    out = []
    for title, series, is_share in groups:
        known = {n: c for n, c in series.items() if c and any(v is not None for v in c)}
        if known:
            chart = charts.lines(run["epochs"], known, is_share)
            out.append({"title": title, "names": list(known), "chart": chart})
    return out
