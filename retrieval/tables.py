"""Show results as rich tables and CSV; nothing is printed here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from retrieval import metrics
from retrieval.distances import DISTANCES
from retrieval.embeddings import class_names, taken_of
from retrieval.metrics import per_class_recall, score_rows, title_of
from retrieval.number_format import (
    counted,
    level_name,
    p_value,
    percent,
    points,
    points_interval,
    size,
)
from retrieval.results import LEAVE_ONE_OUT

if TYPE_CHECKING:  # importing them loads numba, which `inspect` does not need
    from retrieval.embeddings import Embeddings
    from retrieval.evaluation import Evaluation
    from retrieval.results import Agreement, Comparison, Difference, Inspection, Result, Spread


def evaluation_table(result: Result, width: int = 80) -> RenderableType:
    """l2 and cos side by side, in percent with 95% intervals, as far as the width allows."""
    table = _score_table(result, width, "ranks", "positions", header=True)
    return Group(Text(headline(result), style="bold"), "", table)


def nmi_table(result: Result, width: int = 80) -> RenderableType:
    """The rows of NMI and AMI, in the columns of `evaluation_table`."""
    return _score_table(result, width, "clusters", header=False)


def _score_table(result: Result, width: int, *reads: str, header: bool) -> RenderableType:
    """Columns of fixed width, so that rows can follow later in a table of their own."""
    distances, settings = _shown_distances(result), result["settings"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=header)
    titles = [metric.title.format(k=k) for metric in metrics.METRICS for k in settings["recall_at"]]
    table.add_column("", no_wrap=True, min_width=max(map(len, titles)))
    wide = width >= 20 + 25 * len(distances)
    span = max(len("00.00 to 100.00"), len(f"± 00.00 ({settings['seeds']} seeds)"))
    for d in distances:
        table.add_column(f"{d}, %", justify="right", no_wrap=True, min_width=6)
        if wide:
            title = level_name(settings["level"])
            table.add_column(title, justify="right", style="dim", no_wrap=True, min_width=span)
    for title, scores in score_rows(result["distances"], *reads):
        cells = [cell for score in scores for cell in (score if wide else score[:1])]
        table.add_row(title, *cells)
    return Padding(table, (0, 0, 0, 1), expand=False)


def _shown_distances(result: Result | Comparison | Agreement) -> list[str]:
    return [d for d in DISTANCES if d in result["distances"]]


def headline(result: Result | Comparison) -> str:
    """1,000 queries, each against 999 others · 50 classes · 32 dimensions"""
    queries = counted(result["queries"], "query", "queries")
    if result["protocol"] == LEAVE_ONE_OUT:
        who = f"{queries}, each against {counted(result['gallery'] - 1, 'other')}"
    else:
        who = f"{queries} against a gallery of {result['gallery']:,}"
    dim = result["dim"]
    dims = [dim] if isinstance(dim, int) else dict.fromkeys(dim.values())  # of two files
    shown = " and ".join(map(str, dims))
    classes = counted(result["classes"], "class", "classes")
    return f"{who} · {classes} · {shown} dimensions"


def neighbours_table(result: Agreement) -> RenderableType:
    """Recall@K of the neighbours that a file lists, l2 and cos side by side, in percent."""
    distances = _shown_distances(result)
    titles = (f"{d} (the file's own)" if d == result["distance"] else d for d in distances)
    table = number_table("", *titles, no_wrap=True)
    for k in map(str, result["settings"]["recall_at"]):
        recalls = (result["distances"][d]["recall"][k] for d in distances)
        table.add_row(title_of(f"recall@{k}"), *map(percent, recalls))
    head = (
        f"{result['queries']:,} queries against a gallery of {result['gallery']:,} · "
        f"{result['listed']:,} neighbours listed · {result['dim']} dimensions"
    )
    told = "Of the K neighbours listed first, the share among the K nearest by exact search, in %."
    return Group(Text(head, style="bold"), table, Text(told, style="dim"))


def taken(data: Embeddings) -> str:
    """x.csv: vectors from d0 ... d31, 32 columns; labels from label. Empty for our own files."""
    if "format" in data.attrs:
        return ""
    parts = {name: taken_of(split.taken) for name, split in data.splits.items()}
    if len(set(parts.values())) > 1:
        told = ". ".join(f"{name}: {text}" for name, text in parts.items() if text)
    else:
        told = next(iter(parts.values()), "")
    return f"{data.source}: {told}." if told else ""


def per_class_csv(evaluation: Evaluation, label_names: np.ndarray | None) -> str:
    """label, queries, then Recall@1 for each distance; one line per class that has queries.

    A file that names its integer labels gets a column of names.
    """
    codes, names = evaluation.problem.query_codes, evaluation.problem.names
    columns = {d: per_class_recall(ranks, codes) for d, ranks in evaluation.ranks.items()}
    classes, _, counts = next(iter(columns.values()))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = class_names(names, label_names)
    title = [] if known is None else ["name"]
    writer.writerow(["label", *title, "queries", *(f"recall@1_{d}" for d in columns)])
    for n, code in enumerate(classes):
        name = [] if known is None else [known[code]]
        recalls = (float(recall[n]) for _, recall, _ in columns.values())
        writer.writerow([names[code], *name, counts[n], *recalls])
    return text.getvalue()


def comparison_table(result: Comparison, width: int = 80) -> RenderableType:
    """A, B and the difference in points, with interval and p value as far as the width allows."""
    parts: list[RenderableType] = [
        Text(headline(result), style="bold"),
        Text(f"A  {result['a']}\nB  {result['b']}"),
    ]
    level = level_name(result["settings"]["level"])
    left_out = {level} if width < 70 else set()
    if width < 52:
        left_out |= {"A, %", "B, %"}
    for d in _shown_distances(result):
        titles = (d, "A, %", "B, %", "B - A", level, "p")
        columns = [title for title in titles if title not in left_out]
        table = number_table(*columns, no_wrap=True)
        for name, s in result["distances"][d].items():
            cells = _difference_cells(s, level) | {d: title_of(name)}
            table.add_row(*(cells[column] for column in columns))
        flips = result["flipped"][d]
        gained, lost = len(flips["gained"]), len(flips["lost"])
        queries = counted(gained, "query", "queries")
        parts += [table, Text(f"At rank 1, B gains {queries} and loses {lost:,}.")]
    return Group(*parts)


def _difference_cells(s: Difference, level: str) -> dict[str, str | Text]:
    sure = s["ci"] is not None and (s["ci"][0] > 0 or s["ci"][1] < 0)
    style = ("green" if s["difference"] > 0 else "red") if sure else ""
    return {
        "A, %": percent(s["a"]),
        "B, %": percent(s["b"]),
        "B - A": Text(points(s["difference"]), style=style),
        level: points_interval(s["ci"]),
        "p": p_value(s["p"]),
    }


def inspection_table(result: Inspection) -> RenderableType:
    """One table of splits and one of the file's metadata."""
    table = number_table(*map(escape, (result["format"], *result["splits"])))
    splits = result["splits"].values()
    for title, cell in _INSPECTED.items():
        table.add_row(title, *(cell(split) for split in splits))
    for role in ("vectors", "labels", "paths", "split"):
        names = [split["taken"].get(role, "") for split in splits]
        if any(names):
            table.add_row(f"{role} from", *(Text(name) for name in names))
    if any("entropy" in split for split in splits):
        for title, cell in _ENTROPY.items():
            row = [_nats(cell(split["entropy"])) for split in splits]
            if any(row):
                table.add_row(title, *row)
    parts: list[RenderableType] = [Text(result["file"], style="bold"), table]
    if result["attrs"]:
        parts.append(pairs_table(result["attrs"].items()))
    return Group(*parts)


_INSPECTED = {
    "items": lambda s: f"{s['rows']:,}",
    "dimensions": lambda s: str(s["dim"]),
    "dtype": lambda s: s["dtype"],
    "size": lambda s: size(s["bytes"]),
    "norms": lambda s: _range(s["norms"], "{:.4g}") + (" (unit)" if s["unit_length"] else ""),
    "classes": lambda s: f"{s['labels']['classes']:,}" if s["labels"] else "no labels",
    "items per class": lambda s: (
        _range(s["labels"]["items_per_class"], "{:g}") if s["labels"] else ""
    ),
    "classes of one item": lambda s: (
        f"{s['labels']['single_item_classes']:,}" if s["labels"] else ""
    ),
    "paths": lambda s: "yes" if s["paths"] else "no",
    "rows with NaN or Inf": lambda s: f"{s['checks']['nonfinite_rows']:,}",
    "rows of zeros": lambda s: f"{s['checks']['zero_norm_rows']:,}",
    "equal rows, other label": lambda s: (
        "?"
        if s["checks"]["conflicting_duplicates"] is None
        else f"{s['checks']['conflicting_duplicates']:,}"
    ),
}


_ENTROPY = {  # in nats, those of embeddings up to a constant
    "H(Y)": lambda e: e["labels"],
    "H(Z), l2": lambda e: e["l2"]["embeddings"],
    "H(Z|Y), l2": lambda e: e["l2"]["given_labels"],
    "H(Z) - H(Z|Y), l2": lambda e: e["l2"]["difference"],
    "H(Z), cos": lambda e: e["cos"]["embeddings"],
    "H(Z|Y), cos": lambda e: e["cos"]["given_labels"],
    "H(Z) - H(Z|Y), cos": lambda e: e["cos"]["difference"],
    "H(Y), head's classes": lambda e: (e.get("head") or {}).get("label_entropy"),
    "CE of the head": lambda e: (e.get("head") or {}).get("cross_entropy"),
    "H(Y) - CE": lambda e: (e.get("head") or {}).get("difference"),
}


def _nats(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def pairs_table(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values without lines or titles."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in pairs:
        table.add_row(Text(name, style="dim"), Text(str(value), overflow="fold"))
    return table


def number_table(*columns: str, no_wrap: bool = False) -> Table:
    """A table of numbers; the first column names the rows."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for n, name in enumerate(columns):
        table.add_column(name, justify="right" if n else "left", no_wrap=no_wrap)
    return table


def _range(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    low, middle, high = (
        "beyond float64" if spread[name] is None else form.format(spread[name])
        for name in ("min", "median", "max")
    )
    return low if low == high else f"{low} to {high}, median {middle}"
