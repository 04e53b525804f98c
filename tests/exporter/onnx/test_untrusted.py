"""Files that are no models, or models that want too much, are refused at once."""

import os
import time

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save
from onnx.external_data_helper import set_external_data

from exporter.onnx import untrusted
from exporter.onnx.foreign import Given, foreign_preprocessing
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from retrieval.errors import DmlError
from tests.exporter.models import FLOAT, PROPERTIES, mean_model, model_of


def field(number, payload):
    """A message within a message."""
    length, size = len(payload), bytearray()
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + payload


def nested(depth):
    """Graphs within nodes within graphs."""
    graph = b""
    for _ in range(depth):
        graph = field(1, field(5, field(6, graph)))
    return b"\x08\x08" + field(7, graph)


FILES = {
    "nothing": (b"", "is empty"),
    "a text": (b"hello\n" * 1000, "not a whole ONNX file"),
    "a line": (b"hello", "It is a text."),
    "noise": (np.random.default_rng(0).bytes(3_000_000), "not a whole ONNX file"),
    "zeros": (bytes(1_000_000), "not a whole ONNX file"),
    "a zip": (b"PK\x03\x04" + bytes(100), "zip archive"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "unknown fields": (b"\xa0\x06\x01" * 100, "lacks a version, a graph"),
    "empty nodes": (b"\x08\x08" + field(7, b"\x0a\x00" * 5_000_000), "more than 500,000 parts"),
    "many numbers": (field(7, field(1, field(5, b"\x40\x01" * 5_000_000))), "more than 500,000"),
    "texts that are none": (b"\x08\x08" + field(2, b"\xff\xfe"), "not a whole ONNX file"),
    "deep": (nested(2000), "not a whole ONNX file"),
    "a length beyond the end": (b"\x3a\xff\xff\xff\xff\x0f", "not a whole ONNX file"),
    "an endless number": (b"\x08" + b"\xff" * 100, "not a whole ONNX file"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_model_is_refused_at_once(tmp_path, name):
    content, words = FILES[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    import onnx  # noqa: F401 its import is not what is measured

    before = time.process_time()
    with pytest.raises(DmlError) as caught:
        describe(path)
    assert time.process_time() - before < 3  # below 1 on an idle machine
    assert words in str(caught.value)


def test_every_cut_of_a_model_is_refused_or_readable(tmp_path):
    path = tmp_path / "model.onnx"
    content = mean_model(properties=PROPERTIES).SerializeToString()
    refused = 0
    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            describe(path)
        except DmlError:
            refused += 1
    # Between two properties the rest is whole again; those that matter are asked for.
    assert refused >= len(content) - len(PROPERTIES) - 1


def test_changed_bytes_give_an_error_of_ours_or_a_model(tmp_path, rng):
    path = tmp_path / "model.onnx"
    content = mean_model(properties=PROPERTIES).SerializeToString()
    for _ in range(1000):
        changed = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            changed[place] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            describe(path)
        except DmlError:
            continue


def test_folders_pipes_and_missing_files_are_named(tmp_path):
    with pytest.raises(DmlError, match="does not exist"):
        describe(tmp_path / "none.onnx")
    with pytest.raises(DmlError, match="is a folder"):
        describe(tmp_path)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(DmlError) as caught:
        describe(tmp_path)
    assert caught.value.fix.endswith("model.onnx")
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(DmlError, match="not a regular file"):
        describe(tmp_path / "pipe.onnx")


def test_a_file_beyond_two_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(untrusted.MAX_BYTES + 1)  # takes no room
    with pytest.raises(DmlError, match="2,147,483,648 bytes"):
        describe(path)


def test_names_cannot_change_the_terminal(tmp_path):
    made = mean_model(("n", 5))
    made.graph.input[0].name = "\x1b[31mred"
    save(made, tmp_path / "model.onnx")
    with pytest.raises(DmlError) as caught:
        describe(tmp_path / "model.onnx")
    assert "\x1b" not in str(caught.value)


# Weights in other files


def weighted(location, place="initializer", **span):
    """Images plus weights that lie elsewhere; place: where in the file the weights are told of."""
    tensor = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    set_external_data(tensor, location, **span)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Add", ["mean", "w"], ["embeddings"]),
    ]
    weights = []
    if place == "initializer":
        weights = [tensor]
    elif place == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    else:  # in a branch
        branch = helper.make_graph(
            [helper.make_node("Constant", [], ["c"], value=tensor)],
            "branch",
            [],
            [helper.make_tensor_value_info("c", FLOAT, [3])],
        )
        yes = numpy_helper.from_array(np.array(True), "yes")
        weights = [yes]
        nodes.insert(
            0, helper.make_node("If", ["yes"], ["w"], then_branch=branch, else_branch=branch)
        )
    inputs, outputs = [("images", 2, ["n", 8, 8, 3])], [("embeddings", FLOAT, ["n", 3])]
    return model_of(nodes, inputs, outputs, PROPERTIES, weights)


@pytest.fixture
def folder(tmp_path):
    """With a secret outside of it, and weights inside."""
    (tmp_path / "secret").write_bytes(bytes(12))
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    weights = np.array([1, 2, 3], np.float32).tobytes()
    (inner / "weights").write_bytes(weights)
    (inner / "sub" / "weights").write_bytes(weights)
    return inner


@pytest.mark.parametrize("place", ["initializer", "constant", "branch"])
@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "sub/../../secret",
        "/etc/passwd",
        "..\\secret",
        "C:\\secret",
        "\\\\host\\x",
        "",
        "link",
        "linked/secret",
    ],
)
def test_weights_outside_the_folder_are_refused(folder, location, place):
    (folder / "link").symlink_to("../secret")
    (folder / "linked").symlink_to("..")
    save(weighted(location, place), folder / "model.onnx")
    with pytest.raises(DmlError, match="outside its folder"):
        describe(folder / "model.onnx")


@pytest.mark.parametrize("location", ["*/_ORT_MEM_ADDR_/*", "none", "sub", "n\0ul"])
def test_weights_that_are_no_file_are_refused(folder, location):
    """The first is how ONNX Runtime names a place in memory."""
    save(weighted(location, offset=4096, length=12), folder / "model.onnx")
    with pytest.raises(DmlError, match=r"lacks the file|outside its folder"):
        describe(folder / "model.onnx")


@pytest.mark.parametrize("span", [{"offset": 8, "length": 12}, {"length": 13}, {"offset": -4}])
def test_weights_beyond_the_end_of_their_file_are_refused(folder, span):
    save(weighted("weights", **span), folder / "model.onnx")
    with pytest.raises(DmlError, match="do not belong together"):
        describe(folder / "model.onnx")


@pytest.mark.parametrize("location", ["weights", "sub/weights"])
def test_weights_beside_the_model_are_used_and_hashed(folder, location, monkeypatch):
    save(weighted(location), folder / "model.onnx")
    monkeypatch.chdir(folder)
    model = describe("model.onnx")
    images = np.zeros((2, 8, 8, 3), np.uint8)
    np.testing.assert_array_equal(Session(model, "cpu").run(images), [[1, 2, 3]] * 2)
    (folder / location).write_bytes(bytes(12))
    assert describe("model.onnx").sha256 != model.sha256
    with pytest.raises(DmlError, match="was changed"):
        Session(model, "cpu")


@pytest.mark.parametrize(("batch", "side"), [(10_000_000, 8), (4097, 8), (2000, 224)])
def test_a_fixed_batch_that_fills_the_memory_is_refused(tmp_path, batch, side):
    path = tmp_path / "a.onnx"
    save(mean_model((batch, side, side, 3), FLOAT), path)
    with pytest.raises(DmlError, match=f"batches of {batch:,} images") as caught:
        describe(path)
    assert "dynamic" in caught.value.fix


def test_a_fixed_batch_is_also_judged_by_the_size_that_the_user_names(tmp_path):
    path = tmp_path / "a.onnx"
    save(mean_model((1000, "h", "w", 3), FLOAT), path)
    model = describe(path)
    one = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    assert foreign_preprocessing(model, Given(32, **one)).crop == 32
    with pytest.raises(DmlError, match="batches of 1,000 images"):
        foreign_preprocessing(model, Given(512, **one))


def test_a_compiled_engine_is_refused(tmp_path):
    nodes = [helper.make_node("EPContext", ["images"], ["embeddings"], domain="com.microsoft")]
    inputs, outputs = [("images", 2, ["n", 8, 8, 3])], [("embeddings", FLOAT, ["n", 3])]
    save(model_of(nodes, inputs, outputs), tmp_path / "model.onnx")
    with pytest.raises(DmlError, match="EPContext"):
        describe(tmp_path / "model.onnx")


def test_a_run_in_place_of_a_model_is_to_be_exported(tmp_path):
    (tmp_path / "best.pt").touch()
    with pytest.raises(DmlError, match="is a folder") as caught:
        describe(tmp_path)
    assert caught.value.fix.endswith(f"dmltool export {tmp_path}")
