"""python -m benchmarks.studies [FOLDER ...]: add sweeps, draw the figures of docs/studies.md.

FOLDER is that of a finished sweep whose name is in REFERENCES. The numbers are in
benchmarks/studies.json; `make docs` writes the tables of the page.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measure import table
from retrieval.bootstrap import paired_runs

FILE = Path(__file__).parent / "studies.json"
DOCS = Path(__file__).parent.parent / "docs"
Run = dict[str, Any]
REFERENCES: dict[str, dict[str, str]] = {
    "group-options": {"loss.options": "{ce_weight = 0.0}"},
    "group-anchors": {"loss.options.anchors": "2", "batches.images": "8"},
    "ce-options": {"loss.options": "{}"},
    "ce-batchnorm": {"network.batchnorm": "false"},
    "ce-length": {"loss.length": "0"},
    "ce-batches": {"batches.balance": "false"},
    "spce-options": {"loss.options": "{}"},
}
"""The setting that the others of a sweep are compared with: as in the paper."""


def load() -> dict[str, list[Run]]:
    """The runs of every study."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def add_runs(study: str, runs: Sequence[Run]) -> None:
    """Add runs to the file."""
    write(load() | {study: [*load().get(study, []), *runs]})


def write(found: dict[str, list[Run]]) -> None:
    """Write the file, a line for each run of Fig. 1 and for each setting of a sweep."""
    parts = (
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]"
        for name, runs in found.items()
    )
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


# Sweeps


def add_sweep(folder: Path) -> None:
    """Put the settings of a finished sweep into the file, in the order of its grid."""
    rows = json.loads((folder / "sweep.json").read_text())["rows"]
    rows.sort(key=lambda row: row["trial"])
    reference = next(row for row in rows if row["values"] == REFERENCES[folder.name])
    write(load() | {folder.name: [compared(row, reference) for row in rows]})


def compared(row: Run, reference: Run) -> Run:
    """A setting: scores of every seed, and its difference to the reference with an interval.

    "gap" is that of Recall@1 (cos) over Recall@1 (l2), compared in the same way.
    """
    runs = [run["validation"] for run in row["runs"]]
    found = {"values": row["values"], "seeds": [run["seed"] for run in row["runs"]]}
    found |= {d: [round(run["scores"][d]["recall@1"], 5) for run in runs] for d in ("cos", "l2")}
    if row is reference:
        return found | {"reference": True}
    others = [run["validation"] for run in reference["runs"]]
    own, theirs = ({d: hits(of, d) for d in ("cos", "l2")} for of in (runs, others))
    gains = {"difference": own["cos"] - theirs["cos"]}
    gains["gap"] = gains["difference"] - (own["l2"] - theirs["l2"])
    for name, gain in gains.items():
        mean, span, p = paired_runs(gain, np.array(runs[0]["queries"]))
        found[name] = rounded(mean, *span, p)
    return found


def rounded(*values: float) -> list[float]:
    return [round(float(value), 5) for value in values]


def hits(runs: Sequence[Run], distance: str) -> np.ndarray:
    """Queries with Recall@1 of every run and class, (S, C)."""
    return np.array([run["hits"][distance] for run in runs])


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


def sweep_table(name: str) -> str:
    """The settings of a sweep with their differences to the reference, in points."""
    rows = load().get(name)
    if not rows:
        return "Not measured yet.\n"
    keys = list(rows[0]["values"])
    lines = []
    for row in rows:
        scores = [mean_and_std([100 * value for value in row[d]]) for d in ("cos", "l2")]
        cells = [shown(row["values"][key]) for key in keys]
        lines.append([*cells, *scores, *(points(row.get(key)) for key in ("difference", "gap"))])
    header = [f"`{key}`" for key in keys] + ["Recall@1 cos", "Recall@1 l2"]
    return table([*header, "difference (cos)", "change of the gap cos - l2"], lines)


def shown(value: str) -> str:
    """A value of the grid; of a table of options the keys and values."""
    inner = value.strip("{}").replace('"', "")
    return f"`{inner}`" if inner else "as the preset"


def points(found: Sequence[float] | None) -> str:
    """A difference and its interval in points; empty for the reference."""
    if found is None:
        return ""
    mean, low, high = (f"{100 * value:+.1f}" for value in found[:3])
    return f"{mean} ({low} to {high})"


def ensembles_table() -> str:
    """Recall@1 and NMI by the number of networks."""
    lines = []
    for row in load().get("ensembles", []):
        scores = [mean_and_std([100 * value for value in row[key]]) for key in ("recall", "nmi")]
        gains = [points(row.get(key)) for key in ("difference", "nmi_difference")]
        lines.append([row["networks"], scores[0], gains[0], scores[1], gains[1]])
    header = ["networks", "Recall@1", "difference to one", "NMI", "difference to one"]
    return table(header, lines) if lines else "Not measured yet.\n"


def tables() -> dict[str, str]:
    """The tables of docs/studies.md by name."""
    found = {name: sweep_table(name) for name in REFERENCES}
    return {"fig1": fig1_table(), "ensembles": ensembles_table()} | found


# Figures


def draw_fig1(path: Path) -> None:
    """Losses and accuracies by epoch, mean over seeds, for every data set."""
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
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a PNG of 64 colours, a third as large as with all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


def curve(axes: Any, runs: list[Run], key: str, style: str, label: str, factor: float = 1) -> None:
    """The mean over runs, and the range from lowest to highest."""
    epochs = [record["epoch"] for record in runs[0]["epochs"] if key in record]
    values = np.array([[r[key] for r in run["epochs"] if key in r] for run in runs]) * factor
    axes.plot(epochs, values.mean(0), style, label=label, marker="." if len(epochs) < 15 else "")
    axes.fill_between(epochs, values.min(0), values.max(0), color=style[:2], alpha=0.2, lw=0)


def draw_differences(path: Path) -> None:
    """The difference of every setting to its reference with the interval, a panel for each loss."""
    from matplotlib.figure import Figure

    losses = {"group": "Group Loss", "ce": "cross-entropy", "spce": "SPCE"}
    found = {loss: rows for loss in losses if (rows := differences(loss))}
    heights = [len(rows) + 1 for rows in found.values()]
    figure = Figure(figsize=(8, 0.24 * sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(found), height_ratios=heights, squeeze=False)[:, 0]
    for one, (loss, rows) in zip(axes, found.items(), strict=True):
        for place, (_, (mean, low, high, *_)) in enumerate(rows):
            colour = "C7" if low <= 0 <= high else "C0" if mean > 0 else "C3"
            one.plot([100 * low, 100 * high], [place, place], color=colour)
            one.plot(100 * mean, place, "o", color=colour, ms=4)
        one.axvline(0, color="k", lw=0.8)
        one.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
        one.set_title(losses[loss], fontsize=9)
        one.set_ylim(len(rows) - 0.5, -0.5)
        one.grid(alpha=0.3, axis="x")
    axes[-1].set_xlabel("Recall@1 (cos) less that of the reference, points, 95 % interval")
    save(figure, path)


def differences(loss: str) -> list[tuple[str, list[float]]]:
    """The settings of all sweeps of a loss but the references: what is set, and the difference."""
    found = []
    for name in REFERENCES:
        for row in load().get(name, []) if name.startswith(f"{loss}-") else []:
            values = row["values"].items()
            parts = [v if k == "loss.options" else f"{k.split('.')[-1]}={v}" for k, v in values]
            label = ", ".join(parts).translate(str.maketrans("", "", '{}" '))
            if "difference" in row:
                found.append(
                    (label.replace("ce_weight=0.0,", "").replace(",", ", "), row["difference"])
                )
    return found


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        add_sweep(Path(folder))
    draw_fig1(DOCS / "studies-fig1.png")
    draw_differences(DOCS / "studies-differences.png")
