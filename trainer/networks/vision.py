"""Import torchvision, also where its compiled operators are missing.

PyPI's torchvision is built for CUDA. Beside a CPU-only torch its library does not load, and the
import fails where it describes two operators of that library. Models and transforms use neither,
so after such a failure their schemas are declared here and the import is tried again. Whoever
imports torchvision, timm included, imports this module first.
"""

import importlib
import sys
from types import ModuleType

import torch

from retrieval.errors import DmlError, install

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = ("nms", "qnms")
declared: list[torch.library.Library] = []  # operators live as long as their library object


def _load() -> ModuleType:
    try:
        try:
            return importlib.import_module("torchvision")
        except (ImportError, RuntimeError) as error:
            if "operator torchvision::" not in str(error):
                raise
        _forget()
        _declare()
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        _forget()
        if isinstance(error, ModuleNotFoundError) and error.name == "torchvision":
            raise DmlError("This needs torchvision.", f"{error}.", install("cpu")) from error
        raise DmlError(
            "The library torchvision cannot be imported.",
            f"{error}. Its version may not belong to torch {torch.__version__}.",
            install("cpu"),
        ) from error


def _declare() -> None:
    """Declare the operators that the import describes."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + SCHEMA)
    declared.append(library)


def _forget() -> None:
    """Drops what a failed import left behind; a second one would find it and fail elsewhere."""
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]


torchvision = _load()
