"""Load weights into a backbone, from a file or a download. Nothing is ever unpickled."""

import pickle
import re
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.errors import DmlError, listed
from retrieval.files import sha256
from retrieval.formats import safetensors, torch_files
from retrieval.formats.arrays import BFLOAT16
from retrieval.formats.named_arrays import Entry
from retrieval.registry import nearest

TIMEOUT = 20  # seconds without a byte until a download is given up
SHOWN = 4
NAMED = ("imagenet", "none")


def is_file(source: str) -> bool:
    """Whether weights are a file, and not `imagenet` or `none`."""
    return source not in NAMED


def existing(source: str) -> Path:
    """The file of weights that the user has named."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    near = nearest(source, NAMED)
    raise DmlError(
        f"There are no weights {source!r}.",
        "Weights are `imagenet`, `none`, or a file, and there is no such file.",
        f"Did you mean {near!r}? --weights {near}" if near else "Check the path.",
    )


def read(path: Path) -> dict[str, Entry]:
    """The tensors in a file by their names, described but not yet read."""
    try:
        found = (safetensors if path.suffix == ".safetensors" else torch_files).catalogue(path)
    except Exception as error:  # readers raise nearly anything when a file is damaged
        why = f"It is damaged, or of another kind: {str(error).partition(chr(10))[0]}"
        if isinstance(error.__cause__, pickle.UnpicklingError):
            why = (
                "It is damaged, of another kind, or holds Python objects; unpickling those can "
                "run any code, so it is never done."
            )
        raise DmlError(
            f"{path} cannot be read as weights.",
            why,
            "Fetch or copy it again, or save tensors only: torch.save(network.state_dict(), name)",
        ) from error
    return found


def _fitted(entry: Entry, wanted: Tensor | None) -> Entry:
    """The tensor without the first axis of length 1 that vectors of the oldest files have."""
    if wanted is None or entry.shape != (1, *wanted.shape) or wanted.ndim != 1:
        return entry
    return replace(entry, shape=entry.shape[1:], read=lambda: entry.read()[0])


def fill(
    module: nn.Module,
    source: str,
    name: str,
    url: str = "",
    heads: Collection[str] = (),
    adapt: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    renamed: tuple[str, str] = ("", ""),
) -> tuple[str, ...]:
    """Fill the module `name` from a file, or from the URL of its ImageNet weights.

    Tensors are named as in the module's state dict, after any common prefix. `heads` are parts that
    the file may have and the module has not. Tensors of the names in `adapt` may have another
    shape. `renamed`, a pattern and its replacement, brings names of the file up to date. Returns
    what was left out of a file.
    """
    if source == "none":
        return ()
    if source == "imagenet" and not url:
        raise unpublished(name)
    path = fetched(url) if source == "imagenet" else existing(source)
    content, wanted, adapt = read(path), module.state_dict(), adapt or {}
    content = {re.sub(*renamed, name): entry for name, entry in content.items()}
    prefix = _prefix(content, wanted)
    inner = {key.removeprefix(prefix): e for key, e in content.items() if key.startswith(prefix)}
    here = {key: _fitted(entry, wanted.get(key)) for key, entry in inner.items()}
    missing = [k for k in wanted if k not in here and not k.endswith("num_batches_tracked")]
    shapes = [
        f"{key} {here[key].shape} instead of {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in here and key not in adapt and here[key].shape != tuple(value.shape)
    ]
    # A part that the module lacks as a whole is some head; further layers of a part that it has
    # are another network (resnet50 within resnet101).
    parts = {key.partition(".")[0] for key in wanted}
    extra = [key for key in here if key not in wanted]
    inside = tuple(f"{head}." for head in heads)
    unexpected = [k for k in extra if k.partition(".")[0] in parts and not k.startswith(inside)]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if any(problems.values()):
        problems["the file holds"] = list(content) or ["nothing"]
        raise DmlError(
            f"{path} does not hold the weights of {name}.",
            "\n".join(f"{k}: {listed(v, SHOWN)}" for k, v in problems.items() if v),
            "Give the file of that network, or the network of that file: --backbone NAME",
        )
    values = tensors({key: here[key] for key in wanted if key in here})
    for key, change in adapt.items():
        if values[key].shape != wanted[key].shape:
            values[key] = change(values[key])
    with torch.no_grad():
        module.load_state_dict({**wanted, **values})
    left = [*extra, *(key for key in content if not key.startswith(prefix))]
    if source == "imagenet" or not left:  # that its classifier is left out is no news
        return ()
    return (f"{path}: left out {listed(left, SHOWN)}",)


def unpublished(name: str) -> DmlError:
    """The error for a network that nobody has trained on ImageNet."""
    return DmlError(
        f"{name} has no ImageNet weights.",
        "It can be trained from scratch, or from a file.",
        "Train from scratch: --weights none",
    )


def _prefix(content: Mapping[str, Entry], wanted: Mapping[str, Tensor]) -> str:
    """`state_dict.`, `module.`, `backbone.` or whatever stands before most of the wanted names."""
    candidates = {""}
    for key in list(wanted)[:10]:
        candidates |= {n.removesuffix(key) for n in content if n.endswith(f".{key}")}
    return max(sorted(candidates), key=lambda p: sum(p + key in content for key in wanted))


def tensors(content: Mapping[str, Entry]) -> dict[str, Tensor]:
    return {name: _tensor(entry.read()) for name, entry in content.items() if entry.kind in "fiub"}


def _tensor(values: np.ndarray) -> Tensor:
    values = np.array(values)  # a copy: files are mapped read-only
    if values.dtype == BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def fetched(url: str, file_name: str = "") -> Path:
    """The file behind the URL, from the folder of torch.hub or from the network."""
    file_name = file_name or url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    found = re.search(r"-([0-9a-f]{8,})\.", file_name)
    digits = found[1] if found else None
    if not path.exists():
        _download(url, path, digits)
    elif digits and not sha256(path).startswith(digits):
        raise DmlError(
            f"{path} is damaged.",
            f"Its SHA-256 should start with {digits}.",
            f"Delete it, or fetch it again: {url}",
        )
    return path


def _download(url: str, path: Path, digits: str | None) -> None:
    before = socket.getdefaulttimeout()
    # torch.hub opens its addresses without a timeout: offline it could wait for ever.
    socket.setdefaulttimeout(TIMEOUT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), digits, progress=sys.stderr.isatty())
    except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another hash
        raise DmlError(
            f"The weights {path.name} could not be downloaded.",
            f"{url} says: {getattr(error, 'reason', None) or error}.",
            f"Fetch that address elsewhere and put the file here: {path}\n"
            "or name it: --weights FILE\n"
            "or train from scratch: --weights none",
        ) from error
    finally:
        socket.setdefaulttimeout(before)
