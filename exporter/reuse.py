"""Find a model that an earlier export wrote, and check that it is the one that is wanted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exporter.networks import Member
from exporter.onnx.metadata import INPUTS, Metadata
from exporter.onnx.model import Model, describe
from retrieval.errors import DmlError


def check_origin(model: Model, members: Sequence[Member]) -> Metadata:
    """The metadata of a model; a DmlError unless it was exported from these checkpoints."""
    own = model.metadata
    if own is None or own.checkpoints() != [member.sha256 for member in members]:
        names = ", ".join(str(member.path) for member in members)
        runs = [str(m.path.parent if m.path.name == "best.pt" else m.path) for m in members]
        again = shlex.join(runs) + (" --out FOLDER" if len(runs) > 1 else "") + " --force"
        raise DmlError(
            f"{model.path} is not the model of {names}.",
            "It was exported from another checkpoint, so its embeddings are different.",
            f"Name the run it was exported from, or export again: dmltool export {again}",
        )
    return own


def resumed_model(
    path: Path, members: Sequence[Member], precision: str, input: str, normalize: bool
) -> Model:
    """The model of an interrupted export with the same settings."""
    model = describe(path)
    own = check_origin(model, members)
    form = (own.preprocessing.layout, own.preprocessing.dtype)
    differences = [
        f"{option}: the file has {found}"
        for option, found, wanted in (
            ("--precision", own.precision, precision),
            ("--normalize", own.normalized, normalize),
            ("--input", "-".join(reversed(form)), "-".join(reversed(INPUTS[input]))),
        )
        if found != wanted
    ]
    if differences:
        raise DmlError(
            f"{path} is not the model of this export.",
            "\n".join(differences),
            "Start again: --force instead of --resume",
        )
    return model


def earlier_result(model: Model, path: Path) -> dict[str, Any]:
    """What the export that made this very model recorded at `path`; empty if it is not there."""
    try:
        found = json.loads(path.read_text())["model"]
        return found if found["sha256"] == model.sha256 else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def earlier_model(path: Path, members: Sequence[Member], normalize: bool) -> Model:
    """The model of an earlier export of the same runs, to embed with under --no-onnx."""
    if not path.exists():
        raise DmlError(
            f"There is no {path} to embed with.",
            "--no-onnx uses the model of an earlier export.",
            "Leave out --no-onnx, or compute with the checkpoint itself: --backend torch",
        )
    model = describe(path)
    own = check_origin(model, members)
    if normalize and not own.normalized:
        raise DmlError(
            f"The embeddings of {model.path} are not of length 1.",
            "--normalize is part of the model, and --no-onnx uses the one that is there.",
            "Leave out --normalize, or export the model again: --onnx --force",
        )
    return model
