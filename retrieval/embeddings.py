"""Embeddings and Split: what an embedding file holds, once read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Split:
    """One set of items. Arrays may be memory-mapped; vectors keep the dtype of the file."""

    vectors: np.ndarray  # (N, D) float16, float32, float64, int8 or uint8
    labels: np.ndarray | None = None  # (N,) integers of any width, or str
    paths: np.ndarray | None = None  # (N,) str
    taken: dict[str, str] = field(
        default_factory=dict
    )  # vectors, labels, paths -> name in the file


@dataclass(frozen=True)
class Embeddings:
    """The splits of one file: `test`, or `query` and `gallery`; `train` may be there too."""

    source: Path
    format: str
    splits: dict[str, Split]
    label_names: np.ndarray | None = None  # (C,) str
    attrs: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what came up while reading, for people
    neighbours: np.ndarray | None = None  # (Q, K) gallery rows that the file lists for its queries
