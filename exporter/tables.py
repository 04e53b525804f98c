"""Results of exports as tables for the terminal. Nothing is printed here."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text


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
    title, table = _titled(
        f"{model['path']}: {model['bytes'] / 1e6:,.1f} MB, {model['dim']} dimensions"
    )
    table.add_column("")
    for name in ("torch", "ONNX"):
        table.add_column(name, justify="right")
    found = model["parity"]
    if found:
        recalls = (f"{100 * found[f'recall_{name}']:.2f}" for name in ("torch", "onnx"))
        table.add_row(f"Recall@1 (cos, {found['images']:,} images)", *recalls)
        table.add_row("same nearest neighbour, %", "", f"{100 * found['agreement']:.2f}")
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
            f"{100 * row['recall']:.2f}",
            f"{100 * row['changed']:.2f}",
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
            table.add_row(f"Recall@1 {distance}", f"{100 * full:.2f} → {100 * half:.2f} in float16")
    return Group(title, table)


def _titled(text: str) -> tuple[Text, Table]:
    """A title above a table may be longer than a title of it."""
    return Text(text, style="bold", no_wrap=True), Table(box=box.SIMPLE_HEAD)
