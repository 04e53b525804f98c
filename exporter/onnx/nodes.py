"""Find the first and the last nodes of an ONNX graph, and sort its nodes.

The first nodes turn pixels into the input of the network, the last ones make the embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

# What turns pixels into the network's input, and embeddings into ones of length 1. In few bits
# these would lose more than all the layers between them, and they cost next to nothing.
PIXELS = {"Cast", "Transpose", "Div", "Sub", "Mul", "Add", "ReduceMean", "Identity", "Expand"}
LENGTHS = {"Div", "ReduceL2", "LpNormalization", "Clip", "Max", "Expand", "Shape", "Identity"}

POOLING = {
    "AveragePool", "BatchNormalization", "Cast", "Flatten", "Gather", "Gemm", "GlobalAveragePool",
    "LayerNormalization", "ReduceMean", "Reshape", "Squeeze", "Transpose",
}  # fmt: skip


def head(model: ModelProto) -> list[NodeProto]:
    """The nodes between the pixels and the first layer."""
    reached = {value.name for value in model.graph.input}
    constants = {tensor.name for tensor in model.graph.initializer} | {""}
    reached -= constants
    found = []
    for node in model.graph.node:  # in the order of computation
        given = set(node.input) - constants
        if node.op_type in PIXELS and given and given <= reached:
            found.append(node)
            reached.update(node.output)
    return found


def joints(model: ModelProto) -> tuple[list[NodeProto], list[str]]:
    """The nodes that concatenate the embeddings of an ensemble, and the names of their inputs."""
    return _before(model, [value.name for value in model.graph.output], {"Concat"})


def tail(model: ModelProto) -> list[NodeProto]:
    """The nodes that normalise and concatenate embeddings; most models have none."""
    joined, ends = joints(model)
    return joined + _before(model, ends, LENGTHS)[0]


def _before(
    model: ModelProto, names: list[str], kinds: set[str]
) -> tuple[list[NodeProto], list[str]]:
    """The nodes of these kinds that lead to values without others between, and their inputs."""
    maker = {name: node for node in model.graph.node for name in node.output}
    found, ends = {}, []
    while names:
        node = maker.get(name := names.pop())
        if node is None or node.op_type not in kinds:
            ends.append(name)
        elif node.name not in found:
            found[node.name] = node
            names += node.input
    return list(found.values()), ends


def last(model: ModelProto) -> list[NodeProto]:
    """The tail and the projection and pooling before it.

    They compute the embedding itself, and 8 bits are too coarse to tell near neighbours apart.
    """
    maker = {name: node for node in model.graph.node for name in node.output}
    found = {node.name: node for node in tail(model)}
    for end in joints(model)[1]:
        node, products = maker.get(end), 0
        while node is not None and node.op_type in LENGTHS | POOLING:
            products += node.op_type == "Gemm"
            if products > 1:
                break
            found[node.name] = node
            node = maker.get(node.input[0])
    return list(found.values())


def straighten(model: ModelProto) -> None:
    """Clean up after the float16 converter.

    Removes casts to float16 and back between two nodes that compute in float32, and sorts the nodes
    in the order of computation.
    """
    from onnx import TensorProto

    nodes = list(model.graph.node)
    rounded = {n.output[0]: n.input[0] for n in nodes if n.name.endswith("_cast_to_fp16_node")}
    way = {}  # from a value that is cast back to float32, to what it was before
    for node in nodes:
        widens = node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT
        if widens and node.input[0] in rounded:
            way[node.output[0]] = rounded[node.input[0]]
    ends = {value.name for value in model.graph.output}
    renamed = {way[name]: name for name in way if name in ends}
    nodes = [n for n in nodes if n.output[0] not in way]
    for node in nodes:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                name = way.get(name, name)
                names[at] = renamed.get(name, name)
    used = {name for node in nodes for name in node.input} | ends
    nodes = [n for n in nodes if n.op_type != "Cast" or n.output[0] in used]
    del model.graph.node[:]
    del model.graph.value_info[:]  # some of them wrong by now
    model.graph.node.extend(in_order(nodes))


def in_order(nodes: list[NodeProto]) -> list[NodeProto]:
    """Sort nodes so that each one follows its inputs, otherwise in the given order."""
    maker = {name: node.name for node in nodes for name in node.output}
    by_name = {node.name: node for node in nodes}
    done: dict[str, NodeProto] = {}
    stack = [node.name for node in reversed(nodes)]
    while stack:
        name = stack[-1]
        needs = {maker[i] for i in by_name[name].input if i in maker} - done.keys()
        if name in done or not needs:
            done.setdefault(name, by_name[name])
            stack.pop()
        else:
            stack += sorted(needs)
    return list(done.values())
