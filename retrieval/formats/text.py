"""Read labels alone: one per line in `.txt`, a list in `.json`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError
from retrieval.formats import labels, named_arrays
from retrieval.formats.encodings import open_text
from retrieval.formats.refused import json_records


def read_labels(path: Path, key: str | None) -> np.ndarray:
    with open_text(path) as file:  # whatever ends a line is read as a newline
        text = file.read()
    if path.suffix.lower() != ".json":
        return labels.parsed(text.rstrip("\n").split("\n"), str(path))
    if error := json_records(path):
        raise error
    value = json.loads(text)
    if isinstance(value, dict):
        lists = {k: v for k, v in value.items() if isinstance(v, list)}
        entries = {
            k: named_arrays.Entry((len(v),), "list", "S", lambda: np.empty(0))
            for k, v in lists.items()
        }
        value = lists[named_arrays.choose_labels(entries, key, path)]
    if not isinstance(value, list):
        raise DmlError(
            f"{path} holds no list.",
            "Labels are a JSON list of integers or strings.",
            "Write them as [1, 2, 3].",
        )
    return labels.from_values(value, str(path))
