"""Check what is installed and works on this machine, and say how to install what is missing.

Modules are imported, and ONNX Runtime runs a model on each device.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from types import ModuleType

from rich.table import Table
from rich.text import Text

from exporter.onnx import providers
from retrieval.errors import DmlError, install
from retrieval.formats import FORMATS
from retrieval.number_format import counted, size
from retrieval.resources import available_memory, processors
from trainer.trackers import TRACKERS

OK, NOTE, MISSING, BROKEN = "ok", "note", "missing", "broken"
MARKS = {OK: ("✓", "green"), NOTE: ("·", "dim"), MISSING: ("✗", "red"), BROKEN: ("✗", "red")}
CPU = install("cpu")
BASE = install()
ONE_BUILD = ("faiss", "onnxruntime")  # for CPUs or GPUs: together they overwrite each other
LEAST_DISK, LEAST_MEMORY = 1 << 30, 1 << 30  # the demo needs less than half of each


@dataclass(frozen=True)
class Check:
    """The result of one check: a line of the table."""

    group: str
    name: str
    state: str
    found: str
    fix: str = ""
    needed: bool = False  # by the quick start: train, export, eval
    size: int | None = None  # bytes on disk


def examine(folder: Path | None = None) -> list[Check]:
    """Run all checks for work in `folder`, by default the current one."""
    return [
        Check("dmltool", "dmltool", OK, _version("cli")),
        Check("dmltool", "Python", OK, f"{platform.python_version()}, {sys.prefix}"),
        *_evaluation(),
        *_training(),
        *_export(),
        *_readers(),
        *_machine(folder or Path.cwd()),
    ]


def ready(checks: list[Check]) -> bool:
    """Whether everything that train, export and eval need works."""
    return all(check.state in (OK, NOTE) for check in checks if check.needed)


def _evaluation() -> list[Check]:
    def gpus(faiss: ModuleType) -> str:
        count = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
        return f"k-means on {counted(count, 'GPU')}" if count else "no GPU for k-means"

    names = ("numpy", "h5py", "numba", "sklearn", "jinja2")
    found = [_module("evaluate", name, BASE, needed=True) for name in names]
    return [*found, _module("evaluate", "faiss", CPU, gpus)]


def _ranks_on(count: int) -> str:
    """Whether the GPUs count ranks correctly."""
    from retrieval.ranking.backends.trial import fault_of

    names = [f"cuda:{n}" for n in range(count)]
    faults = [f"{name}: {fault}" for name in names if (fault := fault_of(name, 512))]
    return f"does not count ranks ({'; '.join(faults)})" if faults else "counts ranks as the CPU"


def _training() -> list[Check]:
    def device(torch: ModuleType) -> str:
        from trainer.run.device import pick_device

        picked = pick_device("auto")
        if picked.type == "cuda":
            count = torch.cuda.device_count()
            found = f"CUDA {torch.version.cuda}, {count} x {torch.cuda.get_device_name(0)}"
            return f"{found}; {_ranks_on(count)}"
        if picked.type == "cpu":
            why = f"CUDA {torch.version.cuda} finds no GPU" if torch.version.cuda else "no CUDA"
            return f"trains on the CPU, {counted(torch.get_num_threads(), 'thread')} ({why})"
        return f"trains on {picked.type}"

    def vision(_: ModuleType) -> str:
        from trainer.networks.vision import torchvision

        return f"{len(torchvision.models.list_models())} models"

    found = [_module("train", "torch", CPU, device, needed=True)]
    if found[0].state == OK:  # torchvision does not import without it
        found.append(_module("train", "torchvision", CPU, vision, True, "trainer.networks.vision"))
        found += _cuda_libraries()
    found += [_module("train", name, CPU, needed=True) for name in ("PIL", "matplotlib")]
    found.append(_module("train", "pytorch_metric_learning", CPU))
    found.append(_module("train", "timm", install("extras"), optional=True))
    return found + [
        _module("train", entry.module, install(entry.extra), optional=True) for entry in TRACKERS
    ]


def _cuda_libraries() -> list[Check]:
    """The packages of a CUDA build of torch: several gigabytes, useless without a GPU."""
    names = {*_packages("nvidia"), *_packages("triton")}
    text, total = f"{len(names)} packages of torch", sum(map(_size, names))
    return [Check("train", "CUDA libraries", NOTE, text, size=total)] if names else []


def _export() -> list[Check]:
    names = ("onnx", "onnxscript", "onnxruntime")
    found = [_module("export", name, CPU, needed=True) for name in names]
    if any(check.state != OK for check in found):  # trying a device takes a model
        return found
    for device in ("cuda", "tensorrt"):
        missing = providers.missing_for(device)
        state, text = (OK, "works") if missing is None else (NOTE, missing[0])
        found.append(Check("export", providers.TITLES[device], state, text))
    return [*found, Check("export", "used", OK, providers.pick("auto")[1])]


def _readers() -> list[Check]:
    built_in = [suffix for format in FORMATS if not format.needs for suffix in format.suffixes]
    found = [Check("read", "built in", OK, " ".join(built_in))]
    for format in FORMATS:
        if format.needs:
            check = _module("read", format.needs, install(format.extra), optional=True)
            room = None if format.needs == "torch" else check.size  # torch has a line of its own
            text = f"{format.needs} {check.found}"
            found.append(replace(check, name=" ".join(format.suffixes), found=text, size=room))
    return found


def _machine(folder: Path) -> list[Check]:
    def enough(name: str, least: int, found: int, what: str, fix: str) -> Check:
        state = OK if found >= least else MISSING
        text = f"{size(found)} {what}"
        return Check("machine", name, state, text, "" if state == OK else fix, needed=True)

    free, room = shutil.disk_usage(folder).free, "make room, or work in another folder"
    return [
        Check("machine", "processors", OK, f"{processors()}"),
        enough("disk", LEAST_DISK, free, f"free in {folder}", room),
        enough("memory", LEAST_MEMORY, available_memory(), "available", "close other programs"),
    ]


def _module(
    group: str,
    name: str,
    fix: str,
    more: Callable[[ModuleType], str] | None = None,
    needed: bool = False,
    module: str | None = None,
    optional: bool = False,
) -> Check:
    """Import a module and report its version; `more` adds to the line."""
    packages = _packages(name)
    if name in ONE_BUILD and len(packages) > 1:
        both = f"{' and '.join(packages)} are both installed"
        return Check(group, name, BROKEN, both, "pip uninstall both, then install one", needed)
    try:
        with providers.quiet():
            found = import_module(module or name)
            text = ", ".join(filter(None, [_version(name), more(found) if more else ""]))
    except ModuleNotFoundError as error:
        if error.name == name:
            state = NOTE if optional else MISSING
            return Check(group, name, state, "not installed", fix, needed)
        return Check(group, name, BROKEN, f"it lacks {error.name}", fix, needed)
    except DmlError as error:
        return Check(group, name, BROKEN, f"{error.what} {error.why}", error.fix or fix, needed)
    except Exception as error:  # a broken library fails in ways of its own
        words = f"{type(error).__name__}: {error}".strip().splitlines()[-1][:200]
        return Check(group, name, BROKEN, words, f"reinstall: {fix}", needed)
    return Check(group, name, OK, text, "", needed, _size(packages[0]) if packages else None)


@cache
def _modules() -> Mapping[str, list[str]]:
    return packages_distributions()


def _packages(module: str) -> list[str]:
    """The installed packages that hold a module."""
    return sorted(set(_modules().get(module, ())))


def _version(module: str) -> str:
    packages = _packages(module)
    return distribution(packages[0]).version if packages else ""


def _size(package: str) -> int:
    """Bytes of the files that pip installed for a package."""
    files = distribution(package).files or []
    return sum(os.path.getsize(path) for file in files if os.path.isfile(path := file.locate()))


def table(checks: list[Check]) -> Table:
    out = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "left", "right", "left"):
        out.add_column(justify=justify)
    group = ""
    for check in checks:
        if group and check.group != group:
            out.add_row("", "", "", "", "")
        mark, style = MARKS[check.state]
        text = Text(check.found)
        if check.fix:
            text.append(f"\n{check.fix}", style="bold" if check.state != NOTE else "dim")
        title = check.group if check.group != group else ""
        room = "" if check.size is None else size(check.size)
        out.add_row(title, Text(mark, style), check.name, room, text)
        group = check.group
    return out
