"""Load the networks that an export starts from, their data set, and models of earlier exports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exporter.onnx import INPUTS
from exporter.onnx.metadata import Metadata, Preprocessing
from exporter.onnx.model import Model, describe
from exporter.results import ModelResult
from retrieval.errors import DmlError, command
from retrieval.files import sha256
from trainer.config import Config
from trainer.data.datasets import DataSet
from trainer.networks.embedder import Embedder
from trainer.run import checkpoint
from trainer.run.setup import load_data, load_embedder


@dataclass(frozen=True)
class Member:
    """A trained network and its checkpoint."""

    path: Path
    sha256: str
    state: dict[str, Any]
    config: Config
    embedder: Embedder


class Together(nn.Module):
    """One or more embedders that run on the same images as one network.

    Several embeddings of an image are l2-normalised and concatenated: the cosine of two such
    embeddings is the mean of the members' cosines. With `normalize` the whole embedding has
    length 1; without it, that of an ensemble has the square root of the number of members.
    """

    dim: int

    def __init__(self, members: Sequence[Embedder | Together], normalize: bool = False) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.normalize = normalize
        self.dim = sum(member.dim for member in members)

    def forward(self, images: Tensor) -> Tensor:
        parts = [member(images) for member in self.members]
        if self.normalize or len(parts) > 1:
            parts = [nn.functional.normalize(part) for part in parts]
        if len(parts) == 1:
            return parts[0]
        if self.normalize:  # each part, so that the concatenation is the last step of the graph
            parts = [part / len(parts) ** 0.5 for part in parts]
        return torch.cat(parts, dim=1)


def load_member(run: Path) -> Member:
    """Load the best checkpoint of a run folder, or the checkpoint at a path."""
    path = run / checkpoint.BEST if run.is_dir() else run
    if run.is_dir() and not path.exists() and (run / checkpoint.LAST).exists():
        raise DmlError(
            f"{run} has no {checkpoint.BEST}.",
            "Its first epoch is not finished, or the file was removed.",
            f"Name the last checkpoint: {command('export', run / checkpoint.LAST)}, "
            f"or continue the training: {command('train', '--resume', run)}",
        )
    state = checkpoint.load(path)
    config = checkpoint.config_of(state, path)
    if missing := asdict(config).keys() - state["config"].keys():
        raise DmlError(
            f"{path} is damaged.",
            f"Its configuration lacks {', '.join(sorted(missing))}, so its network is not known.",
            "Use another checkpoint, or train again.",
        )
    state |= {"config": asdict(config)}  # with the defaults of keys that an older version lacks
    return Member(path, sha256(path), state, config, load_embedder(state))


def unfinished(member: Member) -> str:
    """A note on a network whose training has not ended; empty if it has, or if nothing says so."""
    path = member.path
    if path.name not in (checkpoint.BEST, checkpoint.LAST):  # a copy outside its run
        return ""
    try:
        last = checkpoint.load(path.parent)
        epochs = checkpoint.config_of(last, path.parent).schedule.epochs
    except DmlError:  # lost or damaged, which the export does without
        return ""
    if last["epoch"] >= epochs:
        return ""
    return (
        f"{path} is the network of epoch {member.state['epoch']} of {epochs}: its training has not "
        f"ended. It continues with: {command('train', '--resume', path.parent)}"
    )


def check_same_images(members: Sequence[Member]) -> None:
    """Raise a DmlError unless the members have the same classes and prepare images alike.

    Mean and standard deviation may differ, because every member applies its own.
    """
    first = members[0]
    for other in members[1:]:
        if other.state["label_names"] != first.state["label_names"]:
            raise DmlError(
                f"{first.path} and {other.path} were trained on different classes.",
                "The members of an ensemble embed the same images.",
                "Export each run on its own.",
            )
        mine, theirs = (
            Preprocessing.from_checkpoint(each.state).to_dict() for each in (first, other)
        )
        differences = [
            f"{'image size' if key == 'crop' else key}: "
            f"{mine[key]} in {first.path}, {theirs[key]} in {other.path}"
            for key in mine
            if mine[key] != theirs[key] and key not in ("mean", "std")
        ]
        if differences:
            raise DmlError(
                "The networks expect differently prepared images.",
                "\n".join(differences),
                "Embed with each of them and join the files: dmltool merge A.h5 B.h5 --out C.h5",
            )


def load_training_data(member: Member, root: str | Path | None) -> DataSet:
    """Load the data set of a member and check that its training classes are still the same.

    `root` is where the data set is now, if it has moved.
    """
    config = member.config
    if root is not None:
        config = replace(config, data=replace(config.data, root=str(root)))
    data = load_data(config)
    now = [data.label_names[c] for c in data.classes("train")]
    then = member.state["label_names"]
    if now != then:
        gone, new = sorted(set(then) - set(now))[:3], sorted(set(now) - set(then))[:3]
        raise DmlError(
            f"The data set {data.name} is not the one that {member.path} was trained on.",
            f"It had {len(then):,} training classes and has {len(now):,} now; "
            f"missing: {gone}; new: {new}.",
            "Name the right place: --data PATH, or embed these images: dmltool embed",
        )
    return data


# Models of earlier exports


def check_origin(model: Model, members: Sequence[Member]) -> Metadata:
    """The metadata of a model; a DmlError unless it was exported from these checkpoints."""
    own = model.metadata
    if own is None or own.checkpoints() != [member.sha256 for member in members]:
        names = ", ".join(str(member.path) for member in members)
        runs = [str(m.path.parent if m.path.name == checkpoint.BEST else m.path) for m in members]
        out = ["--out", "FOLDER"] if len(runs) > 1 else []
        again = command("export", *runs, *out, "--force")
        raise DmlError(
            f"{model.path} is not the model of {names}.",
            "It was exported from another checkpoint, so its embeddings are different.",
            f"Name the run it was exported from, or export again: {again}",
        )
    return own


def existing_model(path: Path, members: Sequence[Member], **wanted: object) -> Model:
    """The model of an earlier export of the same runs, with the wanted values of these options."""
    if not path.exists():
        raise DmlError(
            f"There is no {path} to embed with.",
            "--no-onnx uses the model of an earlier export.",
            "Leave out --no-onnx, or compute with the checkpoint itself: --backend torch",
        )
    model = describe(path)
    own = check_origin(model, members)
    forms = {form: name for name, form in INPUTS.items()}
    found = {
        "precision": own.precision,
        "normalize": own.normalized,
        "input": forms.get((own.preprocessing.layout, own.preprocessing.dtype)),
    }
    if differences := [name for name, value in wanted.items() if found[name] != value]:
        raise DmlError(
            f"{path} is not the model of this export.",
            "\n".join(f"--{name}: it was exported with {found[name]}." for name in differences),
            "Give the same options as before, or export the model again: --onnx --force",
        )
    return model


def earlier_result(model: Model, path: Path) -> ModelResult | None:
    """The result at `path` of the export that wrote this model; None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["model"]
        return found if found["sha256"] == model.sha256 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
