"""Write an embedding file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from retrieval.embeddings import Embeddings, Split
from retrieval.formats.hdf5.writing import check_name, write


def save(
    path: str | Path,
    data: Embeddings | Split | Mapping[str, Split],
    *,
    label_names: np.ndarray | None = None,
    attrs: Mapping[str, object] | None = None,
    force: bool = False,
) -> None:
    """Write embeddings to an HDF5 file, whole or not at all.

    Parameters
    ----------
    path : str or Path
        The file, with a name that ends in .h5, .hdf5 or .he5.
    data : Embeddings, Split or dict of Split
        What to write: all splits of an `Embeddings`, a `Split` as the split "test", or splits by
        name ("test", or "query" and "gallery"; "train" may be there too).
    label_names : array of str (C,), optional
        Names of the integer labels. Default: those of an `Embeddings`.
    attrs : dict, optional
        Metadata, such as {"model": "resnet50"}. Default: that of an `Embeddings`.
    force : bool
        Overwrite a file that exists.
    """
    check_name(path)
    splits: Mapping[str, Split]
    if isinstance(data, Embeddings):
        splits = data.splits
        label_names = data.label_names if label_names is None else label_names
        attrs = data.attrs if attrs is None else attrs
    else:
        splits = {"test": data} if isinstance(data, Split) else data
    write(path, dict(splits), label_names, None if attrs is None else dict(attrs), force)
