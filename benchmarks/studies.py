"""python -m benchmarks.studies: draws the figures of docs/studies.md.

The numbers are in benchmarks/studies.json; `make docs` writes the tables of the page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import table

FILE = Path(__file__).parent / "studies.json"
DOCS = Path(__file__).parent.parent / "docs"
Run = dict[str, Any]


def load() -> dict[str, list[Run]]:
    """The runs of every study."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def add_runs(study: str, runs: Sequence[Run]) -> None:
    """Add runs to the file, which has one line for each."""
    found = load()
    found.setdefault(study, []).extend(runs)
    parts = (
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]"
        for name, runs in found.items()
    )
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


# Tables


def mean_and_std(values: Sequence[float], digits: int = 1) -> str:
    """The mean, and the standard deviation if there are several values."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def fig1_table() -> str:
    """What both trainings end with, mean and standard deviation over seeds."""
    lines = []
    for (data, loss), runs in by_training().items():
        ends = [run["epochs"][-1] for run in runs]
        digits = {"loss": 3, "norm": 1, "spce_eval": 2, "best_scale": 2, "spce_rescaled": 3}
        cells = [mean_and_std([end[key] for end in ends], n) for key, n in digits.items()]
        head = mean_and_std([100 * end["head"] for end in ends]) if loss == "ce" else ""
        means = mean_and_std([100 * end["means"] for end in ends])
        lines.append([data, loss.upper(), len(runs), *cells, head, means])
    header = ["data", "trained with", "seeds", "training loss", "length of embeddings", "SPCE"]
    header += ["best scale", "SPCE at that scale", "accuracy, head", "accuracy, nearest mean"]
    return table(header, lines)


def by_training() -> dict[tuple[str, str], list[Run]]:
    found: dict[tuple[str, str], list[Run]] = {}
    for run in load().get("fig1", []):
        found.setdefault((run["data"], run["loss"]), []).append(run)
    return found


def tables() -> dict[str, str]:
    """The tables of docs/studies.md by name."""
    return {"fig1": fig1_table()}


# Figures


def draw_fig1(path: Path) -> None:
    """Losses and accuracies by epoch, mean over seeds, for every data set."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = by_training()
    names = list(dict.fromkeys(data for data, _ in runs))
    figure = Figure(figsize=(9, 3.3 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 2, squeeze=False)
    for (left, right), data in zip(axes, names, strict=True):
        ce, spce = runs[data, "ce"], runs[data, "spce"]
        curve(left, ce, "loss", "C0-", "CE, trained with CE")
        curve(left, spce, "loss", "C1-", "SPCE, trained with SPCE")
        curve(left, ce, "spce", "C2-", "SPCE, trained with CE")
        curve(left, ce, "spce_rescaled", "C2:", "the same at the best scale")
        curve(right, ce, "head", "C0-", "CE, head", 100)
        curve(right, ce, "means", "C0:", "CE, nearest mean", 100)
        curve(right, spce, "means", "C1-", "SPCE, nearest mean", 100)
        left.set(title=f"{data}: loss", xlabel="epoch", yscale="log")
        right.set(title=f"{data}: test accuracy, %", xlabel="epoch")
        for one in (left, right):
            one.grid(alpha=0.3)
            one.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(path))


def curve(axes: Any, runs: list[Run], key: str, style: str, label: str, factor: float = 1) -> None:
    """The mean over runs, and the range from lowest to highest."""
    epochs = [record["epoch"] for record in runs[0]["epochs"] if key in record]
    values = np.array([[r[key] for r in run["epochs"] if key in r] for run in runs]) * factor
    axes.plot(epochs, values.mean(0), style, label=label, marker="." if len(epochs) < 15 else "")
    axes.fill_between(epochs, values.min(0), values.max(0), color=style[:2], alpha=0.2, lw=0)


if __name__ == "__main__":
    draw_fig1(DOCS / "studies-fig1.png")
