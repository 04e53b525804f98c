"""Read Lance tables, folders that `lance.write_dataset` or LanceDB wrote, in order of their rows.

No trial in a child process: Lance runs threads of its own, which a fork does not copy.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from retrieval.embeddings import Wanted
from retrieval.formats import arrow
from retrieval.formats.columns import Table


def table(path: Path, wanted: Wanted) -> Table:
    import lance

    found = lance.dataset(str(path))
    batches = partial(found.to_batches, batch_size=arrow.BATCH_ROWS)
    return arrow.as_table(path, arrow.Source(found.schema, found.count_rows(), batches))
