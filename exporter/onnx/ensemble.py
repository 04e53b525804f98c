"""Several models as one: the same images in, their embeddings side by side out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exporter.onnx import untrusted
from exporter.onnx.metadata import SCHEMA, to_properties
from exporter.onnx.session import Model, describe
from exporter.onnx.trace import BATCH, INPUT, LARGEST, OUTPUT, clean, save, set_properties
from retrieval.errors import DmlError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NAMES = {"crop": "image size", "layout": "input layout", "dtype": "input type"}


def write_ensemble(paths: Sequence[Path], target: Path, normalize: bool = False) -> None:
    """One graph: each embedding l2-normalised, then all of an image concatenated.

    The cosine of two such embeddings is the mean of the members' cosines. normalize: their length
    is 1; else it is the square root of the number of members.
    """
    if len(paths) < 2:
        raise DmlError(
            f"An ensemble of {len(paths)} model{'s' * (len(paths) != 1)} is none.",
            "It joins the embeddings of at least two.",
            "Name more runs or models.",
        )
    models = [describe(path) for path in paths]
    check_members(models)
    protos = [untrusted.parse(untrusted.read_bytes(model.path), model.path) for model in models]
    check_versions(models, protos)
    joined = join(models, protos, normalize)
    clean(joined)
    set_properties(joined, properties(models, normalize))
    save(joined, target)


def check_members(models: Sequence[Model]) -> None:
    for model in models:
        if model.metadata is None:
            raise DmlError(
                f"{model.path} does not say how images are prepared for it.",
                "Members of an ensemble get the same images, so all must say it.",
                "Use models made by `dmltool export`.",
            )
        if model.beside:
            raise DmlError(f"{model.path} keeps weights in other files; an ensemble is one file.")
    first = models[0]
    for model in models[1:]:
        mine, theirs = first.preprocessing.to_dict(), model.preprocessing.to_dict()
        # Mean and std are inside the graphs, so they may differ.
        differences = [
            f"{NAMES.get(key, key)}: {mine[key]} in {first.path}, {theirs[key]} in {model.path}"
            for key in mine
            if mine[key] != theirs[key] and key not in ("mean", "std")
        ]
        if differences:
            raise DmlError(
                "The models want different images.",
                "\n".join(differences),
                "Embed with each of them and join the files: dmltool merge A.h5 B.h5 --out C.h5",
            )


def check_versions(models: Sequence[Model], protos: Sequence[ModelProto]) -> None:
    versions = [{o.domain: o.version for o in proto.opset_import} for proto in protos]
    for model, found in zip(models, versions, strict=True):
        if found[""] != versions[0][""]:
            raise DmlError(
                "The models are of different versions of ONNX's operators.",
                f"{models[0].path} has {versions[0]['']}, {model.path} has {found['']}.",
                "Export them again with the same dmltool.",
            )
    total = sum(proto.ByteSize() for proto in protos)
    if total > LARGEST:
        raise DmlError(
            f"The ensemble is too large for one ONNX file: {total / 1e9:.1f} GB.",
            f"A file holds {LARGEST / 1e9:.1f} GB.",
            "Embed with each of them and join the files: dmltool merge A.h5 B.h5 --out C.h5",
        )


def join(models: Sequence[Model], protos: Sequence[ModelProto], normalize: bool) -> ModelProto:
    from onnx import compose, helper, numpy_helper

    nodes, initializers, infos, outputs = [], [], [], []
    domains: dict[str, int] = {}
    for n, (model, proto) in enumerate(zip(models, protos, strict=True)):
        name = f"m{n}/"
        part = compose.add_prefix(proto, name)
        for node in part.graph.node:
            for at, given in enumerate(node.input):
                if given == name + model.input_name:
                    node.input[at] = INPUT
        nodes += part.graph.node
        initializers += part.graph.initializer
        infos += part.graph.value_info
        nodes += unit_length(name, name + model.output_name, normalize)
        outputs.append(nodes[-1].output[0])
        domains |= {o.domain: max(o.version, domains.get(o.domain, 0)) for o in part.opset_import}
    initializers.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    initializers.append(numpy_helper.from_array(np.array(1e-12, np.float32), "tiny"))
    if normalize:
        root = np.array(len(models) ** 0.5, np.float32)
        initializers.append(numpy_helper.from_array(root, "root"))
    nodes.append(helper.make_node("Concat", outputs, [OUTPUT], name="join", axis=1))
    given = protos[0].graph.input[0].type.tensor_type
    images = helper.make_tensor_value_info(
        INPUT, given.elem_type, [BATCH, *(d.dim_value for d in given.shape.dim[1:])]
    )
    total = sum(model.dim for model in models)
    embeddings = helper.make_tensor_value_info(OUTPUT, 1, [BATCH, total])
    graph = helper.make_graph(
        nodes, "ensemble", [images], [embeddings], initializers, value_info=infos
    )
    return helper.make_model(
        graph,
        producer_name="dmltool",
        ir_version=max(proto.ir_version for proto in protos),
        opset_imports=[helper.make_opsetid(*pair) for pair in sorted(domains.items())],
    )


def unit_length(name: str, given: str, shorter: bool) -> list[NodeProto]:
    """given -> name + "unit", as torch.nn.functional.normalize has it: zeros stay zeros.

    shorter: and then by the square root of the number of models.
    """
    from onnx import helper

    def node(kind: str, inputs: list[str], output: str, **options: int) -> NodeProto:
        return helper.make_node(kind, inputs, [name + output], name=name + output, **options)

    nodes = [
        node("ReduceL2", [given, "axis"], "length", keepdims=1),
        node("Max", [f"{name}length", "tiny"], "divisor"),
        node("Div", [given, f"{name}divisor"], "unit"),
    ]
    return [*nodes, node("Div", [f"{name}unit", "root"], "share")] if shorter else nodes


def properties(models: Sequence[Model], normalize: bool) -> dict[str, str]:
    """The first one's preprocessing, and what the members are."""
    metadata = [model.metadata for model in models]
    members = [
        {
            "arch": each.arch,
            "embedding_dim": model.dim,
            "loss": each.loss,
            "precision": each.precision,
            "checkpoint_sha256": each.checkpoint_sha256,
            "model_sha256": model.sha256,
            "mean": list(each.preprocessing.mean),
            "std": list(each.preprocessing.std),
        }
        for model, each in zip(models, metadata, strict=True)
    ]
    own = {key: value for key, value in models[0].properties.items() if key.startswith("dmltool.")}
    for key in ("parity", "checkpoint_sha256", "quantization"):
        own.pop(f"dmltool.{key}", None)
    return own | to_properties(
        {
            "schema": SCHEMA,
            "arch": " + ".join(each.arch for each in metadata),
            "embedding_dim": sum(model.dim for model in models),
            "l2_normalized": normalize,
            "loss": _joined([each.loss for each in metadata]),
            "dataset": _joined([each.dataset for each in metadata]),
            "precision": _joined([each.precision for each in metadata]),
            "ensemble": json.dumps(members, sort_keys=True),
        }
    )


def _joined(values: Sequence[str]) -> str:
    return " + ".join(dict.fromkeys(values))
