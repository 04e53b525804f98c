"""Describe what an embedding file holds, as one dict."""

from __future__ import annotations

import numpy as np

from retrieval.checks import conflicting_rows, zero_rows
from retrieval.distances import DISTANCES
from retrieval.embeddings import Embeddings, Split, plain
from retrieval.entropy import embedding_entropies, label_entropy
from retrieval.formats.labels import is_text
from retrieval.problem import finite_rows
from retrieval.resources import StageProgress, blocks, stage
from retrieval.results import Inspection, LabelSummary, SplitEntropy, SplitSummary, Spread
from retrieval.rows.identical import row_groups


def inspect(data: Embeddings, progress: StageProgress | None = None) -> Inspection:
    """Splits with shape, dtype, labels, norms and checks; the file's own metadata."""
    return {
        "version": 1,
        "file": str(data.source),
        "format": data.format,
        "attrs": {name: plain(value) for name, value in data.attrs.items()},
        "label_names": None if data.label_names is None else len(data.label_names),
        "splits": {name: _split(split, name, progress) for name, split in data.splits.items()},
        "notes": list(data.notes),
    }


def with_entropy(
    result: Inspection, data: Embeddings, progress: StageProgress | None = None
) -> Inspection:
    """The inspection with the entropies of each split; rows with NaN or infinity are left out."""
    splits, notes = {}, list(result["notes"])
    for name, split in data.splits.items():
        finite = finite_rows(split.vectors)
        vectors = split.vectors if finite.all() else split.vectors[finite]
        labels = None if split.labels is None else split.labels[finite]
        groups = row_groups(vectors)
        found = {
            d: embedding_entropies(
                vectors, labels, d, stage(progress, f"{name}: pairs ({d})"), groups
            )
            for d in DISTANCES
        }
        entropy: SplitEntropy = {
            "labels": None if labels is None or not len(labels) else label_entropy(labels),
            "l2": found["l2"],
            "cos": found["cos"],
        }
        if without := [d for d in found if found[d]["embeddings"] is None]:
            notes.append(
                f"{name}: H(Z) ({', '.join(without)}) cannot be estimated: it needs two rows that "
                "differ"
            )
        splits[name] = result["splits"][name] | {"entropy": entropy}
    return result | {"splits": splits, "notes": notes}


def _split(split: Split, name: str, progress: StageProgress | None) -> SplitSummary:
    vectors = split.vectors
    norms = np.empty(len(vectors))
    finite = np.empty(len(vectors), bool)
    for part in blocks(vectors):
        block = vectors[part].astype(np.float64)
        finite[part] = np.isfinite(block).all(axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            norms[part] = np.linalg.norm(block, axis=1)
        if progress:
            progress(name, part.stop, len(vectors))
    known = norms[finite]
    return {
        "rows": len(vectors),
        "dim": int(vectors.shape[1]),
        "dtype": vectors.dtype.name,
        "bytes": int(vectors.nbytes),
        "norms": _spread(known),
        "unit_length": bool(len(known) and np.abs(known - 1).max() < 1e-2),
        "labels": _labels(split.labels),
        "paths": split.paths is not None,
        "taken": split.taken,
        "checks": {
            "nonfinite_rows": int(np.count_nonzero(~finite)),
            "zero_norm_rows": zero_rows(vectors),
            "conflicting_duplicates": _conflicts(split, finite),
        },
    }


def _conflicts(split: Split, finite: np.ndarray) -> int | None:
    if split.labels is None or not finite.all():
        return None
    codes = np.unique(split.labels, return_inverse=True)[1]
    return conflicting_rows(row_groups(split.vectors), codes)


def _labels(labels: np.ndarray | None) -> LabelSummary | None:
    if labels is None:
        return None
    names, counts = np.unique(labels, return_counts=True)
    return {
        "kind": "text" if is_text(labels) else "integer",
        "classes": len(names),
        "items_per_class": _spread(counts),
        "single_item_classes": int(np.count_nonzero(counts == 1)),
    }


def _spread(values: np.ndarray) -> Spread | None:
    if not len(values):
        return None
    low, middle, high = (
        float(x) if np.isfinite(x) else None
        for x in (values.min(), np.median(values), values.max())
    )
    return {"min": low, "median": middle, "max": high}
