"""Show what a model file says about itself, and check it: `dmltool inspect model.onnx`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exporter.onnx import untrusted
from exporter.onnx.foreign import Given, foreign_preprocessing
from exporter.onnx.model import Model, describe_graph, printable, shown
from exporter.onnx.session import Session
from exporter.results import CheckResult, GraphSummary, ModelInspection
from retrieval.distances import row_scores
from retrieval.errors import DmlError
from retrieval.ranking.backends.choice import require_device
from retrieval.resources import StageProgress

if TYPE_CHECKING:
    from onnx import ModelProto

SIDE = 224  # pixels of random images for a model that takes any size
IMAGES = 5
SAME_COSINE = 0.999
"""Lowest cosine of an embedding computed alone and in a batch; int8 rounds depending on it."""


def inspect_model(path: Path) -> tuple[ModelInspection, Model | None]:
    """Describe a model file in the types of JSON, without running it, and return its Model.

    A model that cannot embed images is described too, with the reason as `problem` and no Model.
    """
    data = untrusted.read_bytes(path)
    proto = untrusted.parse(data, path)
    found: ModelInspection = {
        "version": 1,
        "file": str(path),
        "format": "onnx",
        "bytes": len(data),
        "graph": _graph(proto),
    }
    try:
        model = describe_graph(proto, data, path)
    except DmlError as error:
        found["problem"] = {"what": error.what, "why": error.why, "fix": error.fix}
        return found, None
    found |= {
        "sha256": model.sha256,
        "weights_beside": [file.name for file in model.beside],
        "input": {
            "name": printable(model.input_name),
            "layout": model.layout or None,
            "dtype": model.dtype,
            "size": model.size and list(model.size),
            "batch": model.batch,
        },
        "output": {"name": printable(model.output_name), "dim": model.dim},
    }
    own = model.metadata
    if own is not None:
        said = {key: value for key, value in asdict(own).items() if key != "preprocessing"}
        found["dmltool"] = said | {"checkpoints": own.checkpoints()}
        found["preprocessing"] = own.preprocessing.to_dict()
    return found, model


def _graph(proto: ModelProto) -> GraphSummary:
    opsets = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    weights = {tensor.name for tensor in proto.graph.initializer}
    return {
        "producer": printable(f"{proto.producer_name} {proto.producer_version}".strip()),
        "ir_version": proto.ir_version,
        "opsets": {printable(name): version for name, version in opsets.items()},
        "nodes": len(proto.graph.node),
        "inputs": [shown(value) for value in proto.graph.input if value.name not in weights],
        "outputs": [shown(value) for value in proto.graph.output],
    }


# Checks


def check_model(
    model: Model,
    runs: Sequence[Path] = (),
    data: str | None = None,
    progress: StageProgress | None = None,
    device: str = "auto",
) -> CheckResult:
    """Run a model on random images; given the runs it was exported from, compare it with them.

    `passed` says for each check whether it succeeded; a DmlError if the comparison fails.
    """
    require_device(device)
    prepared = model.preprocessing
    if prepared is None:  # of random images only shape and type matter, not mean and std
        mean, std = (None, None) if model.dtype == "uint8" else ((0, 0, 0), (1, 1, 1))
        size, layout = None if model.size else SIDE, model.layout or "nchw"
        prepared = foreign_preprocessing(model, Given(size, layout=layout, mean=mean, std=std))
    session = Session(model, "cpu", preprocessing=prepared)
    found = _on_random_images(session, progress)
    if runs:  # repeat the comparison of the export on the same images
        from exporter import networks, parity
        from exporter.image_samples import comparison_images

        members = [networks.load_member(run) for run in runs]
        own = networks.check_origin(model, members)
        networks.check_same_images(members)
        trained_on = networks.load_training_data(members[0], data)
        # `export` has left them out, or reported them.
        images = comparison_images(trained_on, own.preprocessing, own.precision, skip_bad=True)
        network = networks.Together([member.embedder for member in members], own.normalized)
        numbers = parity.check(network, session.run, *images, device=device, progress=progress)
        parity.judge(numbers, own.precision)
        found["parity"] = numbers
    return found


def _on_random_images(session: Session, progress: StageProgress | None) -> CheckResult:
    side, own = session.preprocessing.crop, session.model.metadata
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, side, side, 3), np.uint8)
    batches = [images, images, *(images[n : n + 1] for n in range(IMAGES))]
    rows = []
    for batch in batches:
        rows.append(session.run(batch))  # raises an error for NaN and infinity
        if progress:
            progress("running the model", len(rows), len(batches))
    together, again = rows[:2]
    alone = np.concatenate(rows[2:])
    cosines = row_scores(together, alone, "cos")
    norms = np.linalg.norm(together.astype(np.float64), axis=1)
    passed = {
        "finite embeddings": True,
        "same result twice": bool((together == again).all()),
        "same result alone and in a batch": bool(cosines.min() > SAME_COSINE),
        "other images, other embeddings": bool((together[0] != together[1:]).any(1).all()),
    }
    if own is not None and own.normalized:
        passed["embeddings have norm 1"] = bool(np.abs(norms - 1).max() < 1e-2)
    return {
        "passed": passed,
        "random_images": {
            "images": IMAGES,
            "dim": int(together.shape[1]),
            "norms": [float(norms.min()), float(norms.max())],
            "lowest_cosine_alone": float(cosines.min()),
        },
    }
