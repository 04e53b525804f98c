"""`.pt`, `.pth`: tensors from torch.save, memory-mapped; `weights_only` keeps pickles from running.

torch is imported only here, and only when such a file is read.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError
from retrieval.formats import labels, naming, pt_numpy
from retrieval.formats.arrays import BFLOAT16, refuse_overrun
from retrieval.formats.opening import missing_library

DEPTH = 4  # dicts within dicts


def read(path: Path, key: str | None, with_labels: bool):
    entries = catalogue(path)
    chosen = naming.choose(entries, key, path, with_labels)
    return naming.read_chosen(entries, chosen, path, "torch")


def read_labels(path: Path, key: str | None) -> np.ndarray:
    entries = catalogue(path)
    name = naming.choose_labels(entries, key, path)
    return labels.labels(entries[name].read(), f"{path}::{name}")


def catalogue(path: Path) -> dict[str, naming.Entry]:
    try:
        import torch
    except ImportError as error:
        raise missing_library("torch", "cpu", path) from error
    zipped = zipfile.is_zipfile(path)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            stored = sum(info.file_size for info in archive.infolist())
        refuse_overrun(str(path), stored, os.path.getsize(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what it then refuses
            with torch.serialization.safe_globals(pt_numpy.allowed()):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise DmlError(
            f"{path} holds Python objects other than tensors and arrays.",
            "Unpickling them can run any code, so it is never done.",
            "Save tensors only: torch.save({'embeddings': x, 'labels': y}, name).",
        ) from error
    entries: dict[str, naming.Entry] = {}
    _collect(torch, content, "", entries, DEPTH)
    return entries


def _collect(torch, value: object, name: str, entries: dict, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        entries[name] = _tensor(torch, value)
    elif isinstance(value, pt_numpy.Array):
        array = value.value()
        if isinstance(array, list):  # of an array of objects
            _collect(torch, array, name, entries, 0)
        elif array is not None:
            entries[name] = naming.entry(array)
    elif isinstance(value, dict) and depth:
        for key, item in value.items():
            _collect(torch, item, f"{name}.{key}" if name else str(key), entries, depth - 1)
    elif isinstance(value, list | tuple) and value:
        value = [pt_numpy.unwrapped(item) for item in value]
        if all(type(item) in (int, str, bool, float) for item in value):
            entries[name] = _values(value, name)
        elif depth and len(value) <= 16:
            _collect(torch, {str(n): item for n, item in enumerate(value)}, name, entries, depth)


def _values(value: list | tuple, name: str) -> naming.Entry:
    kind = "S" if type(value[0]) is str else "f" if float in map(type, value) else "i"
    shown = type(value[0]).__name__
    return naming.Entry((len(value),), shown, kind, lambda: labels.from_values(value, name))


def _tensor(torch, tensor) -> naming.Entry:
    shape, shown = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype.is_complex:
        return naming.Entry(shape, f"{tensor.layout} {shown}", "?", lambda: np.empty(0, object))
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16)
        return naming.Entry(shape, shown, "f", lambda: bits.numpy().view(BFLOAT16))
    try:
        return naming.entry(tensor.numpy())
    except (TypeError, RuntimeError):  # float8 and other dtypes that NumPy lacks
        return naming.Entry(shape, shown, "?", lambda: np.empty(0, object))
