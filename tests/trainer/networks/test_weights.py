"""Weights from files and addresses: what is understood, and what is refused."""

import hashlib
import os
import pickle
import re
import socket
import threading
from pathlib import Path

import pytest
import torch

from retrieval.errors import DmlError
from tests.trainer.networks.weights import refuse, same
from trainer.networks import weights
from trainer.networks.backbones import build


def classifier():
    """torchvision's whole resnet18, with weights of its own."""
    from trainer.networks.vision import torchvision

    torch.manual_seed(5)
    return torchvision.models.resnet18()


@pytest.fixture(scope="module")
def whole():
    return classifier().state_dict()


# Weights from files


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3, "arch": "resnet18"},
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"model": {f"module.backbone.{key}": v for key, v in state.items()}},
        lambda state: {"a.b": torch.ones(3), **{f"backbone.{k}": v for k, v in state.items()}},
        lambda state: {k: v for k, v in state.items() if "num_batches" not in k},
        lambda state: {k: torch.nn.Parameter(v, v.is_floating_point()) for k, v in state.items()},
    ],
    ids=["plain", "state_dict", "module", "nested", "backbone", "old", "parameters"],
)
def test_weights_from_a_file_arrive_whatever_stands_around_them(tmp_path, whole, wrap):
    torch.save(wrap(whole), tmp_path / "w.pth")
    built = build("resnet18", str(tmp_path / "w.pth"))
    assert same(built.module, whole)
    assert len(built.notes) == 1
    assert "left out" in built.notes[0]
    assert "fc.weight" in built.notes[0]


@pytest.mark.usefixtures("undrawn")
def test_weights_from_safetensors_arrive(tmp_path, whole):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(whole, tmp_path / "w.safetensors")
    assert same(build("resnet18", str(tmp_path / "w.safetensors")).module, whole)


@pytest.mark.usefixtures("undrawn")
def test_weights_in_bfloat16_arrive_rounded(tmp_path, whole):
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in whole.items()}
    torch.save(halves, tmp_path / "w.pt")
    built = build("resnet18", str(tmp_path / "w.pt"))
    assert built.module.conv1.weight.dtype == torch.float32
    assert torch.equal(built.module.conv1.weight, halves["conv1.weight"].float())


def test_the_old_names_of_densenet_files_are_understood(tmp_path):
    from trainer.networks.vision import torchvision

    torch.manual_seed(5)
    state = torchvision.models.densenet121().state_dict()
    old = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", k): v for k, v in state.items()
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "w.pth")
    assert same(build("densenet121", str(tmp_path / "w.pth")).module, state)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet34", ["missing: layer1.2.conv1.weight", "more"]),
        ("resnet50", ["of another shape: layer1.0.conv1.weight (64, 64, 3, 3)"]),
        ("smallcnn", ["missing: layers.0.weight"]),
    ],
)
def test_the_weights_of_another_network_are_refused_with_a_few_names(tmp_path, whole, name, words):
    torch.save(whole, tmp_path / "w.pth")
    with pytest.raises(DmlError, match=f"does not hold the weights of {name}") as caught:
        build(name, str(tmp_path / "w.pth"))
    for word in words:
        assert word in caught.value.why
    assert len(caught.value.why) < 1500
    assert "--backbone NAME" in caught.value.fix
    assert "the file holds: " in caught.value.why


@pytest.mark.usefixtures("undrawn")
def test_a_deeper_network_of_the_same_kind_is_refused(tmp_path):
    from trainer.networks.vision import torchvision

    torch.save(torchvision.models.resnet34().state_dict(), tmp_path / "w.pth")
    with pytest.raises(DmlError, match="does not hold the weights of resnet18") as caught:
        build("resnet18", str(tmp_path / "w.pth"))
    assert "unexpected: layer1.2.conv1.weight" in caught.value.why


@pytest.mark.usefixtures("undrawn")
def test_damaged_and_foreign_files_are_refused(tmp_path, whole):
    torch.save(whole, tmp_path / "whole.pth")
    data = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.pth").write_text("these are no weights\n" * 50)
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "short.safetensors").write_bytes(b"\xff\xff\x00\x00\x00\x00\x00\x00{}")
    for name in ("half.pth", "text.pth", "empty.pth", "short.safetensors"):
        with pytest.raises(DmlError, match="cannot be read as weights") as caught:
            build("resnet18", str(tmp_path / name))
        assert "damaged" in caught.value.why
    torch.save(torch.zeros(3), tmp_path / "tensor.pth")
    with pytest.raises(DmlError, match="does not hold the weights"):
        build("resnet18", str(tmp_path / "tensor.pth"))


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.usefixtures("undrawn")
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, whole):
    torch.save({"state_dict": whole, "extra": Trap(tmp_path / "ran")}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    for name in ("zip.pth", "plain.pth"):
        with pytest.raises(DmlError, match="cannot be read as weights") as caught:
            build("resnet18", str(tmp_path / name))
        assert "run any code" in caught.value.why
    assert not (tmp_path / "ran").exists()


def test_a_weights_name_that_is_no_file_suggests_a_word():
    with pytest.raises(DmlError, match="no weights 'imagnet'") as caught:
        build("resnet18", "imagnet")
    assert "--weights imagenet" in caught.value.fix
    with pytest.raises(DmlError, match="smallcnn has no ImageNet weights"):
        build("smallcnn", "imagenet")


# Weights from the network


def test_without_a_network_the_error_says_which_file_to_fetch_and_where_to_put_it(hub, monkeypatch):
    seen = []

    def urlopen(*args, **kwargs):
        seen.append(socket.getdefaulttimeout())
        refuse()

    monkeypatch.setattr(torch.hub, "urlopen", urlopen)
    with pytest.raises(DmlError, match=r"resnet50-0676ba61.pth could not be downloaded") as caught:
        build("resnet50", "imagenet")
    why, fix = caught.value.why, caught.value.fix
    assert "https://download.pytorch.org/models/resnet50-0676ba61.pth" in why  # IMAGENET1K_V1
    assert "Name or service not known" in why
    assert str(hub / "resnet50-0676ba61.pth") in fix
    assert "--weights FILE" in fix
    assert "--weights none" in fix  # as an option: it also chooses the preset for scratch
    assert seen == [weights.TIMEOUT]
    assert socket.getdefaulttimeout() is None
    assert not list(hub.iterdir())  # no half of a file


def test_a_server_that_never_answers_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(weights, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        port = server.getsockname()[1]
        errors: list[Exception] = []

        def ask():
            try:
                weights.fetched(f"http://127.0.0.1:{port}/w.pth")
            except DmlError as error:
                errors.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert "timed out" in errors[0].why


@pytest.mark.usefixtures("undrawn")
def test_a_file_that_is_already_there_needs_no_network_and_is_checked(hub, whole, monkeypatch):
    from trainer.networks.vision import torchvision

    hub.mkdir(parents=True)
    torch.save(whole, hub / "w.pth")
    digits = hashlib.sha256((hub / "w.pth").read_bytes()).hexdigest()[:8]
    (hub / "w.pth").rename(hub / f"resnet18-{digits}.pth")

    class Published:
        class IMAGENET1K_V1:
            url = f"https://example.org/resnet18-{digits}.pth"

    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: Published)
    built = build("resnet18", "imagenet")
    assert same(built.module, whole)
    assert not built.notes
    with (hub / f"resnet18-{digits}.pth").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DmlError, match="is damaged") as caught:
        build("resnet18", "imagenet")
    assert "Delete it" in caught.value.fix


def test_a_download_with_another_hash_is_refused_and_not_kept(hub, monkeypatch):
    class Answer:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def info(self):
            return {}

        def read(self, _):
            self.read = lambda _: b""
            return b"an error page"

    Answer.info = lambda self: type("Head", (), {"get_all": lambda *_: None})()
    monkeypatch.setattr(torch.hub, "urlopen", lambda *_, **__: Answer())
    with pytest.raises(DmlError, match="could not be downloaded") as caught:
        build("resnet18", "imagenet")
    assert "invalid hash" in caught.value.why
    assert not list(hub.iterdir())


@pytest.mark.parametrize("name", ["resnet18", "timm:resnet10t"])
def test_without_weights_the_network_is_never_asked(name, monkeypatch):
    if name.startswith("timm"):
        pytest.importorskip("timm")

    def no_sockets(*_, **__):
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", no_sockets)
    monkeypatch.setattr(socket, "getaddrinfo", no_sockets)
    build(name, "none", 32)
