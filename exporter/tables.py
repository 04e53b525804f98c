"""Show results of exports as tables; nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.onnx.model import printable
from exporter.results import EmbeddingsResult, ExportResult, ModelInspection, PrecisionResult
from retrieval.console import short_path
from retrieval.metrics import title_of
from retrieval.number_format import percent, size
from retrieval.tables import number_table, pairs_table

RECALL = title_of("recall@1")


def export_tables(result: ExportResult) -> Group:
    parts: list[RenderableType] = []
    if "model" in result:
        model = result["model"]
        title = f"{short_path(model['path'])}: {size(model['bytes'])}, {model['dim']} dimensions"
        parts += [_title(title), parity_table(model["parity"])]
        if len(model["precisions"]) > 1:
            parts += [_title("By precision, on the same images"), _precisions(model["precisions"])]
    if "embeddings" in result:
        parts.append(embeddings_table(result["embeddings"]))
    return Group(*parts)


def parity_table(found: Mapping[str, Any]) -> Table:
    """The comparison of a model with its network.

    It may be of metadata, which anyone may have written: what is missing or odd is left out.
    """
    table = number_table("", "torch", "ONNX")
    known = {key: value for key, value in found.items() if isinstance(value, int | float)}
    if {"recall_torch", "recall_onnx", "images"} <= known.keys():
        recalls = (percent(known[f"recall_{name}"]) for name in ("torch", "onnx"))
        table.add_row(f"{RECALL} (cos, {known['images']:,} images)", *recalls)
    for title, key, form in (
        ("same nearest neighbour, %", "agreement", percent),
        ("lowest cosine", "min_cosine", "{:.7f}".format),
        ("largest difference", "max_abs", "{:.2g}".format),
        ("largest relative difference", "max_rel", "{:.2g}".format),
    ):
        if key in known:
            table.add_row(title, "", form(known[key]))
    return table


def _precisions(rows: list[PrecisionResult]) -> Table:
    table = number_table("", "MB", "images/s", RECALL, "other nearest, %")
    for row in rows:
        table.add_row(
            row["precision"],
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['images_per_second']:,.0f}",
            percent(row["recall"]),
            percent(row["changed"]),
        )
    return table


def embeddings_table(found: EmbeddingsResult) -> Group:
    table = number_table("split", "rows")
    for split, rows in found["splits"].items():
        table.add_row(split, f"{rows:,}")
    for distance, (full, half) in (found["recall"] or {}).items():
        table.add_row(f"{RECALL} {distance}", f"{percent(full)} → {percent(half)} in float16")
    title = f"{short_path(found['path'])}: {found['dim']} dimensions, {found['dtype']}"
    return Group(_title(title), table)


def _title(text: str) -> Text:
    """A heading above a table; unlike the table's own title, it may be wider than the table."""
    return Text(text, style="bold", no_wrap=True)


def model_table(found: ModelInspection) -> Group:
    """What `inspect` found in a model file, and its checks if they were run."""
    parts: list[RenderableType] = [Text(found["file"], style="bold"), _pairs(_model_lines(found))]

    def add(title: str, body: RenderableType, style: str = "bold") -> None:
        parts.extend([Text(f"\n{title}", style=style), body])

    if "preprocessing" in found:
        add("Preprocessing", _pairs(_preprocessing(found["preprocessing"])))
    if (found.get("dmltool") or {}).get("parity"):
        add("Compared with its network at export", parity_table(found["dmltool"]["parity"]))
    if "problem" in found:
        reasons = "\n".join(filter(None, found["problem"].values()))
        add("It cannot embed images", Text(reasons), "bold red")
    if "check" in found:
        passed = {name: "yes" if good else "NO" for name, good in found["check"]["passed"].items()}
        add("Checked now", _pairs(passed))
        if "parity" in found["check"]:
            parts.append(parity_table(found["check"]["parity"]))
    return Group(*parts)


def _model_lines(found: ModelInspection) -> dict[str, object]:
    graph, own = found["graph"], found.get("dmltool")
    lines: dict[str, object] = {
        "size": f"{size(found['bytes'])}, {graph['nodes']:,} nodes",
        "made by": graph["producer"] or "unknown",
        "ONNX": f"IR version {graph['ir_version']}, opset "
        + ", ".join(f"{name} {version}" for name, version in graph["opsets"].items()),
        "inputs": ", ".join(graph["inputs"]),
        "outputs": ", ".join(graph["outputs"]),
    }
    if "sha256" in found:
        given, made = found["input"], found["output"]
        pixels = given["size"] and " x ".join(map(str, given["size"]))
        lines["images"] = f"{given['dtype']}, {given['layout'] or 'axes unknown'}, " + (
            f"{pixels} pixels" if pixels else "any size"
        )
        lines["batch"] = given["batch"] or "any"
        lines["dimensions"] = made["dim"] or "unknown before it is run"
        lines["sha256"] = found["sha256"]
    if found.get("weights_beside"):
        lines["weights in"] = ", ".join(found["weights_beside"])
    if own is None and "problem" not in found:
        lines["preprocessing"] = "unknown: the file was written by another program"
    if own is not None:
        lines |= {
            "network": own["arch"],
            "loss": own["loss"],
            "data set": own["dataset"],
            "precision": own["precision"],
            "embeddings scaled to norm 1": "yes" if own["normalized"] else "no",
            "checkpoint": ", ".join(own["checkpoints"]),
            "versions": ", ".join(f"{k} {v}" for k, v in sorted(own["versions"].items())),
        }
        lines |= {name: value for name, value in own["others"].items() if name not in lines}
    return lines


def _preprocessing(given: dict[str, Any]) -> dict[str, object]:
    """The lines of the preprocessing, with descriptive names."""
    lines = dict(given)
    inside, draft = lines.pop("inside"), lines.pop("draft")
    decoded = f"smaller, but not below {draft} x resize" if draft else "at full size"
    return lines | {
        "mean and std are applied": "by the model" if inside else "before the model",
        "large JPEGs are decoded": decoded,
    }


def _pairs(lines: Mapping[str, object]) -> Table:
    return pairs_table(
        (printable(key), printable(str(value), 1000)) for key, value in lines.items()
    )
