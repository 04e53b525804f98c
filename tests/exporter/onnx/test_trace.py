"""The embedder as an ONNX file: every backbone, any batch, nothing of this machine in it."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from exporter import parity
from exporter.networks import Together
from exporter.onnx import trace
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from exporter.onnx.trace import traced, write_model
from retrieval.errors import DmlError
from tests.exporter.networks import properties, settled, stripes
from trainer.networks import bninception
from trainer.networks.backbones import BACKBONES

# One of most families, of the parts that all of the family are made of. The exporter takes 10 to 40
# seconds for each of the others, which is more than all other tests together. DenseNet and Swin,
# which take longest, are exported with DMLTOOL_ALL_BACKBONES=1 only; so are blocks that repeat
# an earlier one.
ALWAYS = {
    "smallcnn",
    "resnet50",
    "bninception",
    "googlenet",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_32",
}
ALL = bool(os.environ.get("DMLTOOL_ALL_BACKBONES"))
REST = pytest.mark.skipif(
    not ALL,
    reason="takes long to export; all backbones with DMLTOOL_ALL_BACKBONES=1",
)


@pytest.fixture(autouse=True)
def traced_anew(monkeypatch):
    """Not the graph that another test has traced."""
    monkeypatch.setattr(trace, "traced", traced)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=e.name, marks=() if e.name in ALWAYS else REST) for e in BACKBONES],
)
def test_every_backbone_gives_the_network_s_embeddings_for_any_batch(entry, tmp_path, monkeypatch):
    if not ALL:  # a block of each kind
        blocks = {name: bninception.BLOCKS[name] for name in ("3a", "3c", "5b")}
        monkeypatch.setattr(bninception, "BLOCKS", blocks)
    size = max(32, entry.smallest)
    network = settled(entry.name, size, short=not ALL)
    path = tmp_path / "model.onnx"
    write_model(network, path, size=size, properties=properties(network, size))
    model = describe(path)
    assert (model.batch, model.size, model.dim) == (None, (size, size), 16)
    images, labels = stripes(12, 4, size)
    session = Session(model, "cpu", 1)
    found = session.run(images)
    assert found.std(0).max() > 1e-3 * np.abs(found).max()  # images make a difference
    numbers = parity.check(network, session.run, images, labels, batch_sizes=(1, 3, 7))
    assert numbers["min_cosine"] > 0.999999
    parity.judge(numbers, "fp32")
    # Deep networks of random weights magnify rounding: nearly as close to the truth as torch is.
    near = parity.torch_runner(network)(images)
    with torch.no_grad():
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255
        exact = network.double()(pixels).numpy()
    error, usual = (parity.difference(exact, each)[1] for each in (found, near))
    assert error < max(2e-5, 3 * usual)


def test_the_file_holds_nothing_of_this_machine(exported):
    content = exported.read_bytes()
    for text in (
        str(Path(trace.__file__).parent),
        str(Path.home()),
        "site-packages",
        ".py",
        "pkg.",
    ):
        assert text.encode() not in content


def test_the_same_network_gives_the_same_bytes_in_silence(embedder, exported, tmp_path, capfd):
    path = tmp_path / "model.onnx"
    # Neither the layout of the weights in memory nor the mode of the network matters.
    other = settled().to(memory_format=torch.channels_last).train()
    before = {key: value.clone() for key, value in other.state_dict().items()}
    write_model(other, path, size=16, properties=properties(embedder))
    assert path.read_bytes() == exported.read_bytes()
    assert capfd.readouterr() == ("", "")
    assert other.training
    assert other.backbone.training
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


def test_float_input_and_length_1_are_the_same_network(embedder, exported, unit):
    images, _ = stripes(5)
    plain, short = (Session(describe(path), "cpu", 1).run(images) for path in (exported, unit))
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        short, plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-6
    )
    right = parity.torch_runner(Together([embedder], normalize=True))(images)
    np.testing.assert_allclose(short, right, atol=5e-6)


def test_input_and_output_have_their_names_and_types(exported, unit):
    for path, kind, shape in (
        (exported, onnx.TensorProto.UINT8, ["batch", 16, 16, 3]),
        (unit, onnx.TensorProto.FLOAT, ["batch", 3, 16, 16]),
    ):
        model = onnx.load(path)
        [given], [found] = model.graph.input, model.graph.output
        assert (given.name, found.name) == ("images", "embeddings")
        assert given.type.tensor_type.elem_type == kind
        assert [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim] == shape
        assert found.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        dims = [d.dim_param or d.dim_value for d in found.type.tensor_type.shape.dim]
        assert dims == ["batch", 16]
        assert [(o.domain, o.version) for o in model.opset_import] == [("", trace.OPSET)]


def test_grey_networks_with_normed_embeddings_are_exported(tmp_path):
    size = 40  # maps of 5 x 5, which do not halve
    network = settled(size=size, channels=1, batchnorm=True, dim=0)
    path = tmp_path / "model.onnx"
    write_model(network, path, size=size, properties=properties(network, size))
    images, labels = stripes(12, size=size)
    found = parity.check(network, Session(describe(path), "cpu", 1).run, images, labels)
    assert found["max_rel"] < 1e-5


def test_properties_are_added_and_replaced(exported, tmp_path):
    new, path = {"dmltool.arch": "other", "dmltool.parity": "{}"}, tmp_path / "model.onnx"
    was = describe(exported)
    now = trace.save(was.load(), path, was.properties | new)
    assert now == describe(path)  # without reading the file again
    assert now.properties == was.properties | new
    assert list(now.properties) == sorted(now.properties)


def test_a_network_beyond_one_file_is_refused_before_it_is_traced(embedder, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "LARGEST", 1000)
    monkeypatch.setattr(torch.onnx, "export", None)
    with pytest.raises(DmlError, match="too large for one ONNX file"):
        write_model(embedder, tmp_path / "model.onnx", size=16, properties={})
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_traced_is_an_error_and_leaves_no_file(tmp_path, capfd):
    class Moody(torch.nn.Module):
        def forward(self, images):
            return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))

    network = settled(dim=0)
    network.backbone = Moody()
    with pytest.raises(DmlError, match="cannot be exported") as caught:
        write_model(network, tmp_path / "model.onnx", size=16, properties={})
    assert "The exporter of torch says: " in caught.value.why
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_is_not_there_is_told(exported, tmp_path):
    with pytest.raises(DmlError, match="cannot be written"):
        trace.save(onnx.load(exported), tmp_path / "nowhere" / "model.onnx", {})


@pytest.mark.parametrize("ends", [True, False])
def test_an_interrupt_that_the_exporter_swallows_is_still_one(ends, embedder, monkeypatch):
    def swallow(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            if ends:
                raise torch.onnx.OnnxExporterError("all of our ways have failed") from None

    monkeypatch.setattr(torch.onnx, "export", swallow)
    with pytest.raises(KeyboardInterrupt):
        traced(embedder, 16, "uint8-nhwc")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
