"""Match the rows of two embedding files: by path where both have paths, else by position."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from retrieval.embeddings import Embeddings, Split
from retrieval.errors import DmlError, listed
from retrieval.formats.labels import alike
from retrieval.loading.load import comparable

SHOWN = 3
"""How many of the differing items an error message names."""


def match_rows(
    first: Embeddings, second: Embeddings, leave_out: Iterable[str] = ()
) -> dict[str, np.ndarray | None]:
    """Find the items of the first file in the second; both must hold the same items.

    Parameters
    ----------
    first, second : Embeddings
        Files with the same splits. Labels must agree: by name where both files have names.
    leave_out : names of splits
        Splits that are not matched and may be missing in either file.

    Returns
    -------
    dict
        For each split the rows (N,) of the second file in the order of the first, or None where
        the rows were matched by position.
    """
    names = [[name for name in data.splits if name not in leave_out] for data in (first, second)]
    for data, found in zip((first, second), names, strict=True):
        if not found:
            raise DmlError(
                f"{data.source} has no split to compare.",
                f"It holds {', '.join(data.splits)} only.",
                "Embed the test images as well.",
            )
    if set(names[0]) != set(names[1]):
        raise DmlError(
            f"{first.source} and {second.source} have different splits.",
            f"The first has {', '.join(names[0])}, the second {', '.join(names[1])}.",
            "Choose one split of each with FILE::SPLIT, or embed the same ones.",
        )
    first, second = comparable(first, second)
    return {name: _match_split(name, first, second) for name in names[0]}


def _match_split(split: str, first: Embeddings, second: Embeddings) -> np.ndarray | None:
    a, b = first.splits[split], second.splits[split]
    order = None
    if a.paths is not None and b.paths is not None:
        order = _match_paths(split, a.paths, b.paths, (first.source, second.source))
    elif len(a.vectors) != len(b.vectors):
        raise DmlError(
            f"{split} has {len(a.vectors):,} items in {first.source} and {len(b.vectors):,} in "
            f"{second.source}.",
            "Without paths in both files items are matched by position.",
            "Embed the same images with both models.",
        )
    elif a.labels is None or b.labels is None:
        raise DmlError(
            f"{first.source} and {second.source} cannot be matched.",
            f"Items of {split} have neither paths nor labels in both files: nothing tells whether "
            "they are the same.",
            "Store paths in both files.",
        )
    if a.labels is not None and b.labels is not None:
        labels = b.labels if order is None else b.labels[order]
        _check_labels(split, a, labels, (first.source, second.source))
    return order


def _match_paths(
    split: str, a: np.ndarray, b: np.ndarray, files: tuple[object, object]
) -> np.ndarray:
    if np.array_equal(a, b):  # also where a path occurs twice
        return np.arange(len(a))
    for paths, file in zip((a, b), files, strict=True):
        ordered = np.sort(paths)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise DmlError(
                f"{file} has {twice[0]} more than once in {split}.",
                "The files have their items in different orders, so paths must tell them apart.",
                "Give every item a path of its own.",
            )
    alone = [(np.setdiff1d(a, b), files[0]), (np.setdiff1d(b, a), files[1])]
    if any(len(paths) for paths, _ in alone):
        raise DmlError(
            f"The items of {split} differ.",
            "\n".join(
                f"Only in {has}: {listed(paths, SHOWN)}." for paths, has in alone if len(paths)
            ),
            "Embed the same images with both models.",
        )
    order = np.argsort(b)
    return order[np.searchsorted(b, a, sorter=order)]


def _check_labels(
    split: str, items: Split, labels: np.ndarray, files: tuple[object, object]
) -> None:
    assert items.labels is not None
    a, b = alike(items.labels, labels)
    wrong = np.flatnonzero(a != b)
    if len(wrong):
        raise DmlError(
            f"{len(wrong):,} labels of {split} differ.",
            "\n".join(
                f"{_item(items, row)}: {a[row]} in {files[0]}, {b[row]} in {files[1]}."
                for row in wrong[:SHOWN].tolist()
            ),
            "Embed the same items with the same list of labels; paths in both files match rows.",
        )


def _item(items: Split, row: int) -> str:
    return f"row {row}" if items.paths is None else str(items.paths[row])
