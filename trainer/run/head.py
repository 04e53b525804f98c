"""Apply the head of a run to embeddings: H(Y) - CE, the information that it finds in them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval.embeddings import Embeddings, Split
from retrieval.entropy import label_entropy
from retrieval.errors import DmlError
from retrieval.loading.folders import made_with_another
from retrieval.problem import finite_rows
from retrieval.resources import slices
from retrieval.results import HeadInformation, Inspection
from trainer import losses
from trainer.run import checkpoint

LOGITS = 1 << 22  # held at a time


@dataclass(frozen=True)
class Head:
    """The linear layer of a loss: weights (C, D), bias (C,), the names of its classes."""

    weight: np.ndarray
    bias: np.ndarray
    classes: list[str]
    length: float  # that embeddings are scaled to before it; 0: they are not
    path: Path  # of its checkpoint


def load_head(run: Path) -> Head:
    """The head of a run's best epoch, or of a checkpoint."""
    file = run / checkpoint.BEST if run.is_dir() else run
    state = checkpoint.load(file)
    loss = checkpoint.config_of(state, file).loss
    weight, bias = (state["loss"].get(f"head.{name}") for name in ("weight", "bias"))
    if weight is None:
        raise DmlError(
            f"The run {run} has no linear head.",
            f"Its loss is {loss.name}; these have one: {losses.with_head()}.",
            "Leave out --run, or name a run of one of these losses.",
        )
    weight = weight.double().numpy()
    bias = np.zeros(len(weight)) if bias is None else bias.double().numpy()
    return Head(weight, bias, list(state["label_names"]), loss.length, file)


def with_head(result: Inspection, data: Embeddings, run: Path) -> Inspection:
    """An inspection that has entropies, with H(Y) - CE by the head of a run."""
    head, splits = load_head(run), {}
    notes = []
    if made_with_another(data, head.path):
        notes.append(
            f"the embeddings were made with another checkpoint than {head.path}; name the run "
            "that they come from, or export this one again"
        )
    for name, split in data.splits.items():
        found = head_information(head, data, split)
        summary = result["splits"][name]
        notes += _notes(name, found, summary["rows"], summary["checks"]["nonfinite_rows"] or 0)
        splits[name] = summary | {"entropy": summary["entropy"] | {"head": found}}
    return result | {"splits": splits, "notes": [*result["notes"], *notes]}


def _notes(name: str, found: HeadInformation | None, rows: int, nonfinite: int) -> list[str]:
    """Say which rows of a split H(Y) - CE leaves out."""
    bad = f"; rows with NaN or Inf, left out: {nonfinite:,}" if nonfinite else ""
    if found is None:
        whose = "the other classes" if nonfinite else "its classes"
        return [f"{name}: the head knows none of {whose}, so H(Y) - CE is left out{bad}"]
    if found["rows"] == rows:
        return []
    counted = f"{found['rows']:,} of {rows:,} rows"
    return [f"{name}: H(Y) - CE is of {counted}, whose classes the head knows{bad}"]


def head_information(head: Head, data: Embeddings, split: Split) -> HeadInformation | None:
    """H(Y) - CE on the finite rows whose class the head knows, in nats; None if there are none.

    CE is plain cross-entropy: no smoothing, dropout or temperature.
    """
    _check_fits(head, data, split)
    if split.labels is None:
        return None
    places = {name: k for k, name in enumerate(head.classes)}
    values, codes = np.unique(split.labels, return_inverse=True)
    target = np.array([places.get(_name(value, data), -1) for value in values])[codes]
    rows = np.flatnonzero((target >= 0) & finite_rows(split.vectors))
    if not len(rows):
        return None
    total = sum(
        float(_cross_entropies(head, split.vectors[rows[part]], target[rows[part]]).sum())
        for part in slices(len(rows), max(1, LOGITS // len(head.classes)))
    )
    entropy, cross = label_entropy(target[rows]), total / len(rows)
    return {
        "rows": len(rows),
        "label_entropy": entropy,
        "cross_entropy": cross,
        "difference": entropy - cross,
    }


def _check_fits(head: Head, data: Embeddings, split: Split) -> None:
    if split.vectors.shape[1] != head.weight.shape[1]:
        raise DmlError(
            f"The head takes {head.weight.shape[1]} dimensions; {data.source} has "
            f"{split.vectors.shape[1]}.",
            "The embeddings are not those of this run.",
            "Name the run that the file was exported from.",
        )
    if not head.length and data.attrs.get("normalized"):
        raise DmlError(
            f"The embeddings of {data.source} are scaled to length 1.",
            "The head was trained on embeddings as the network gives them.",
            "Export them again without --normalize.",
        )


def _name(value: object, data: Embeddings) -> str:
    """The name of a class: labels that are numbers may have names in the file."""
    names = data.label_names
    if names is not None and isinstance(value, np.integer) and 0 <= value < len(names):
        return str(names[value])
    return str(value)


def _cross_entropies(head: Head, rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(n,) -log p of the class of each row."""
    rows = rows.astype(np.float64)
    if head.length:
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = head.length * rows / np.maximum(norms, 1e-12)
    logits = rows @ head.weight.T + head.bias  # (n, C)
    top = logits.max(1)
    spread = np.log(np.exp(logits - top[:, None]).sum(1)) + top
    return spread - logits[np.arange(len(rows)), target]
