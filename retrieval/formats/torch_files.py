"""Read `.pt` and `.pth`: tensors of torch.save, memory-mapped, nothing unpickled.

torch is imported only here, and only when such a file is read.
"""

from __future__ import annotations

import os
import pickle
import shlex
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from retrieval.embeddings import Wanted
from retrieval.errors import DmlError
from retrieval.formats import labels, named_arrays, torch_numpy
from retrieval.formats.arrays import BFLOAT16, refuse_bomb, refuse_overrun
from retrieval.formats.refused import python_line, quoted

DEPTH, OBJECTS, NAME_CHARS = 4, 10_000, 1000  # dicts within dicts; what all of them hold


def trial(path: Path, key: str | None, wanted: Wanted) -> None:
    catalogue(path)


def catalogue(path: Path) -> dict[str, named_arrays.Entry]:
    import torch

    zipped = zipfile.is_zipfile(path)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            stored = sum(info.file_size for info in archive.infolist())
        refuse_overrun(str(path), stored, os.path.getsize(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what it then refuses
            with torch.serialization.safe_globals(torch_numpy.allowed()):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise DmlError(
            f"{path} holds Python objects other than tensors and arrays.",
            "Unpickling them can run any code, so it is never done.",
            "Save tensors only: torch.save({'embeddings': x, 'labels': y}, name).",
        ) from error
    if isinstance(content, dict) and content.get("format") == "dmltool-checkpoint":
        raise DmlError(
            f"{path} is a checkpoint of dmltool, not embeddings.",
            "The embeddings of a run are written by export.",
            f"Export it: dmltool export {shlex.quote(str(path.parent))}",
        )
    found = _Collector(torch, path)
    found.add(content, "", DEPTH)
    return found.entries


class _Collector:
    """The tensors and lists of what was loaded; one that is there many times is taken once."""

    def __init__(self, torch: ModuleType, path: Path) -> None:
        self.torch, self.path = torch, path
        self.entries: dict[str, named_arrays.Entry] = {}
        self.seen: set[int] = set()

    def _refuse_records(self, rows: list | tuple) -> None:
        """Raise for one dict for each item, each with a vector of its own."""
        if not all(isinstance(row, dict) for row in rows):
            return
        tensors = [v for v in rows[0].values() if isinstance(v, self.torch.Tensor)]
        if any(tensor.ndim > 1 for tensor in tensors) or not tensors:
            return
        code = (
            f"x = torch.load({quoted(self.path)}, weights_only=True); "
            "torch.save({k: torch.stack([r[k] for r in x]) if torch.is_tensor(x[0][k]) else "
            f"[r[k] for r in x] for k in x[0]}}, {quoted(self.path.with_suffix('.stacked.pt'))})"
        )
        raise self._apart(f"a list of {len(rows):,} dicts", python_line("torch", code))

    def _apart(self, what: str, code: str) -> DmlError:
        why = "Embeddings are one 2-D tensor, not one tensor for each item."
        return DmlError(f"{self.path} holds {what}.", why, f"Stack them: {code}")

    def add(self, value: object, name: str, depth: int) -> None:
        if len(self.entries) > OBJECTS:
            code = "torch.save({'embeddings': torch.stack(vectors)}, name)"
            raise self._apart(f"more than {OBJECTS:,} tensors", code)
        if isinstance(value, self.torch.Tensor):
            self.entries[name] = _tensor(self.torch, value, self.path, name)
        elif id(value) in self.seen:
            return
        elif isinstance(value, torch_numpy.Array):
            self.seen.add(id(value))
            array = value.value()
            if isinstance(array, list):  # of an array of objects
                self.add(array, name, 0)
            elif array is not None:
                self.entries[name] = named_arrays.entry(array)
        elif isinstance(value, dict) and depth:
            self.seen.add(id(value))
            for key, item in value.items():
                if type(key) in (str, int) and len(text := str(key)) <= NAME_CHARS:
                    self.add(item, f"{name}.{text}" if name else text, depth - 1)
        elif isinstance(value, list | tuple) and value:
            self.seen.add(id(value))
            self._refuse_records(value)
            value = [torch_numpy.unwrapped(item) for item in value]
            if all(type(item) in (int, str, bool, float) for item in value):
                self.entries[name] = _values(value, name)
            elif depth and len(value) <= 16:
                for number, item in enumerate(value):
                    self.add(item, f"{name}.{number}" if name else str(number), depth - 1)


def _values(value: list | tuple, name: str) -> named_arrays.Entry:
    kind = "S" if type(value[0]) is str else "f" if float in map(type, value) else "i"
    shown = type(value[0]).__name__
    return named_arrays.Entry((len(value),), shown, kind, lambda: labels.from_values(value, name))


def _tensor(torch: ModuleType, tensor: Any, path: Path, name: str) -> named_arrays.Entry:
    # A tensor that was expanded repeats one value by a stride of 0.
    where = f"{path}::{name}" if name else str(path)
    refuse_bomb(where, os.path.getsize(path), tensor.numel() * tensor.element_size())
    shape, shown = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype.is_complex:
        return named_arrays.refused(shape, f"{tensor.layout} {shown}")
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16)
        return named_arrays.described(shape, BFLOAT16, lambda: bits.numpy().view(BFLOAT16))
    try:
        return named_arrays.entry(tensor.numpy())
    except (TypeError, RuntimeError):  # float8 and other dtypes that NumPy lacks
        return named_arrays.refused(shape, shown)
