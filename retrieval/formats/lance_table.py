"""Read Lance tables, folders that `lance.write_dataset` or LanceDB wrote, in order of their rows.

No trial in a child process: Lance runs threads of its own, which a fork does not copy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrieval.embeddings import Embeddings
from retrieval.formats import arrow


def read(path: Path, key: str | None, with_labels: bool) -> Embeddings:
    return arrow.read_table(path, _open(path), key, with_labels, "lance")


def read_labels(path: Path, key: str | None) -> np.ndarray:
    return arrow.read_table_labels(path, _open(path), key)


def _open(path: Path) -> arrow.Table:
    import lance

    table = lance.dataset(str(path))
    return arrow.Table(
        table.schema,
        table.count_rows(),
        lambda names: table.to_batches(columns=names, batch_size=arrow.BATCH_ROWS),
    )
