"""Show results of exports as tables; nothing is printed here."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrieval.number_format import percent, size


def export_tables(result: dict[str, Any]) -> Group:
    parts = []
    if "model" in result:
        model = result["model"]
        parts.append(parity_table(model))
        if len(model["precisions"]) > 1:
            parts.append(precision_table(model["precisions"]))
    if "embeddings" in result:
        parts.append(embeddings_table(result["embeddings"]))
    return Group(*parts)


def parity_table(model: dict[str, Any]) -> Group:
    title, table = _titled(f"{model['path']}: {size(model['bytes'])}, {model['dim']} dimensions")
    table.add_column("")
    for name in ("torch", "ONNX"):
        table.add_column(name, justify="right")
    found = model["parity"]
    if found:
        recalls = (percent(found[f"recall_{name}"]) for name in ("torch", "onnx"))
        table.add_row(f"Recall@1 (cos, {found['images']:,} images)", *recalls)
        table.add_row("same nearest neighbour, %", "", percent(found["agreement"]))
        table.add_row("lowest cosine", "", f"{found['min_cosine']:.7f}")
        table.add_row("largest difference", "", f"{found['max_abs']:.2g}")
        table.add_row("largest relative difference", "", f"{found['max_rel']:.2g}")
    return Group(title, table)


def precision_table(rows: list[dict[str, Any]]) -> Group:
    title, table = _titled("By precision, on the same images")
    table.add_column("")
    for name in ("MB", "images/s", "Recall@1", "other nearest, %"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["precision"],
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['images_per_second']:,.0f}",
            percent(row["recall"]),
            percent(row["changed"]),
        )
    return Group(title, table)


def embeddings_table(found: dict[str, Any]) -> Group:
    title, table = _titled(f"{found['path']}: {found['dim']} dimensions, {found['dtype']}")
    table.add_column("split")
    table.add_column("rows", justify="right")
    for split, rows in found["splits"].items():
        table.add_row(split, f"{rows:,}")
    if found["recall"]:
        for distance, (full, half) in found["recall"].items():
            table.add_row(f"Recall@1 {distance}", f"{percent(full)} → {percent(half)} in float16")
    return Group(title, table)


def _titled(text: str) -> tuple[Text, Table]:
    """A title above a table may be longer than a title of it."""
    return Text(text, style="bold", no_wrap=True), Table(box=box.SIMPLE_HEAD)


def model_table(found: dict[str, Any]) -> Group:
    """What `inspect` found in a model file, and its checks if they were run."""
    parts: list[RenderableType] = [
        Text(found["file"], style="bold"),
        _pairs(_model_lines(found)),
    ]
    if "preprocessing" in found:
        parts += [
            Text("\nPreprocessing", style="bold"),
            _pairs(_preprocessing(found["preprocessing"])),
        ]
    if (found.get("dmltool") or {}).get("parity"):
        said = found["dmltool"]["parity"]
        parts += [
            Text("\nCompared with its network at export", style="bold"),
            _pairs(_parity(said)),
        ]
    if "problem" in found:
        problem = found["problem"]
        parts.append(Text("\nIt cannot embed images", style="bold red"))
        parts.append(Text("\n".join(filter(None, problem.values()))))
    if "check" in found:
        parts += [Text("\nChecked now", style="bold"), _pairs(_check_lines(found["check"]))]
    return Group(*parts)


def _model_lines(found: dict[str, Any]) -> dict[str, object]:
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
        lines["preprocessing"] = "not said: a model of another program"
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
    """The lines of the preprocessing, with plain names for those that would be riddles."""
    lines = dict(given)
    if "inside" in lines:
        lines["mean and std are applied"] = (
            "by the model" if lines.pop("inside") else "before the model"
        )
    if "draft" in lines:
        times = lines.pop("draft")
        lines["large JPEGs are decoded"] = (
            f"smaller, but not below {times} x resize" if times else "at full size"
        )
    return lines


def _parity(said: dict[str, Any]) -> dict[str, object]:
    """Of the metadata, which anyone may have written: what is missing or odd is left out."""
    forms = {
        "recall_torch": ("Recall@1 of the network, %", percent),
        "recall_onnx": ("Recall@1 of the model, %", percent),
        "agreement": ("same nearest neighbour, %", percent),
        "min_cosine": ("lowest cosine", lambda x: f"{x:.7f}"),
        "images": ("images", lambda x: f"{x:,}"),
    }
    return {
        title: form(said[key])
        for key, (title, form) in forms.items()
        if isinstance(said.get(key), int | float)
    }


def _check_lines(check: dict[str, Any]) -> dict[str, object]:
    lines: dict[str, object] = {
        name: "yes" if good else "NO" for name, good in check["passed"].items()
    }
    return lines | _parity(check.get("parity", {}))


def _pairs(lines: dict[str, object]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in lines.items():
        text = "".join(c if c.isprintable() else "?" for c in str(value)[:1000])
        table.add_row(Text(str(name)[:80], style="dim"), Text(text, overflow="fold"))
    return table
