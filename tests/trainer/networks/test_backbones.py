"""Backbones: the table, weights from files and addresses, timm, and torchvision's operators."""

import builtins
import hashlib
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from retrieval.errors import DmlError  # noqa: E402
from tests.forks import Forked  # noqa: E402
from trainer.networks import weights  # noqa: E402
from trainer.networks.backbones import BACKBONES, build  # noqa: E402

ROOT = Path(__file__).parents[3]


def run(code: str) -> str:
    """What it prints, in a process that has imported torch and no torchvision."""
    start = "import sys, warnings\nassert 'torchvision' not in sys.modules\n"
    ended, told, errors = Forked("-c", start + "warnings.simplefilter('error')\n" + code).end()
    assert (ended, errors) == (0, "")
    return told


@pytest.fixture
def undrawn(monkeypatch):
    """Weights of any value: to draw the random ones of large networks takes longest."""
    names = ("kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "normal_", "uniform_")
    for name in names:
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty folder for downloads, and no network."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    return tmp_path / "hub" / "checkpoints"


def refuse(*_, **__):
    raise urllib.error.URLError("Name or service not known")


def classifier():
    """torchvision's whole resnet18, with weights of its own."""
    from trainer.networks.vision import torchvision

    torch.manual_seed(5)
    return torchvision.models.resnet18()


@pytest.fixture(scope="module")
def whole():
    return classifier().state_dict()


def same(module, state) -> bool:
    return all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


# The table


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("entry", BACKBONES, ids=lambda entry: entry.name)
def test_every_backbone_builds_without_weights_and_gives_its_features(entry):
    built = build(entry.name, "none", 64)
    with torch.no_grad():
        features = built.module.eval()(torch.zeros(2, 3, 64, 64))
    assert features.shape == (2, entry.features) == (2, built.features)
    assert entry.summary
    assert not built.notes
    parameters = sum(p.numel() for p in built.module.parameters())
    if claimed := re.search(r"(\d+) M parameters", entry.summary):
        assert abs(int(claimed[1]) - parameters / 1e6) < 0.75


@pytest.mark.parametrize("name", ["smallcnn", "densenet121", "googlenet", "swin_t"])
def test_at_the_smallest_size_numbers_are_finite(name):
    entry = next(entry for entry in BACKBONES if entry.name == name)
    module = build(name, "none", entry.smallest).module.eval()
    with torch.no_grad():
        features = module(torch.rand(2, 3, entry.smallest, entry.smallest))
    assert features.shape == (2, entry.features)
    assert features.isfinite().all()
    # The dropout of a classifier is gone with it.
    assert not [m for m in module.modules() if type(m) is torch.nn.Dropout and m.p > 0]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "convnext_tiny"])
def test_features_under_the_removed_classifier_are_those_of_torchvision(name):
    from trainer.networks.vision import torchvision

    original = torchvision.models.get_model(name, weights=None).eval()
    for parameter in original.parameters():
        parameter.data.uniform_(-0.1, 0.1)
    head = next(entry.head for entry in BACKBONES if entry.name == name)
    seen = []
    original.get_submodule(head).register_forward_hook(lambda _, given, __: seen.append(given[0]))
    ours = build(name, "none", 64).module.eval()
    ours.load_state_dict(original.state_dict(), strict=False)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        original(images)
        assert torch.equal(ours(images), seen[0])


def test_googlenet_normalises_as_its_transform_input_does():
    from trainer.networks.vision import torchvision

    built = build("googlenet", "none", 32)
    original = torchvision.models.googlenet(
        weights=None, aux_logits=False, init_weights=False, transform_input=True
    )
    pixels = torch.rand(1, 3, 8, 8)
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    mine = (pixels - torch.tensor(built.mean).view(3, 1, 1)) / torch.tensor(built.std).view(3, 1, 1)
    theirs = original._transform_input((pixels - mean) / std)
    torch.testing.assert_close(mine, theirs)


def test_listing_the_table_imports_no_torch():
    code = "import sys, trainer.networks.backbones; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(DmlError, match=r"no backbone 'resnet5'") as caught:
        build("resnet5")
    assert "'resnet50'" in caught.value.fix
    assert "timm:NAME" in caught.value.why


@pytest.mark.parametrize(
    ("name", "size", "fix"), [("vit_b_16", 100, "crop=96"), ("densenet121", 20, "crop=29")]
)
def test_a_size_that_the_network_cannot_take_is_told_before_it_is_built(name, size, fix):
    with pytest.raises(DmlError, match=f"cannot take images of {size} pixels") as caught:
        build(name, "none", size)
    assert fix in caught.value.fix


# timm


def test_a_timm_network_gives_the_features_that_it_says():
    pytest.importorskip("timm")
    built = build("timm:mobilenetv3_small_050", "none", 32)
    with torch.no_grad():
        assert built.module.eval()(torch.rand(2, 3, 32, 32)).shape == (2, built.features)


def test_a_timm_transformer_is_built_for_the_image_size_and_has_its_own_normalisation():
    pytest.importorskip("timm")
    built = build("timm:vit_tiny_patch16_224", "none", 64)
    assert built.module.pos_embed.shape[1] == 4 * 4 + 1
    assert built.mean == (0.5, 0.5, 0.5)


def test_timm_names_suggest_the_nearest_network_and_tag():
    pytest.importorskip("timm")
    with pytest.raises(DmlError, match="no network 'resnt18'") as caught:
        build("timm:resnt18")
    assert "'timm:resnet18'" in caught.value.fix
    with pytest.raises(DmlError, match="no weights 'a1_in2k' of resnet18") as caught:
        build("timm:resnet18.a1_in2k")
    assert "'timm:resnet18.a1_in1k'" in caught.value.fix
    with pytest.raises(DmlError, match="no network 'hf-hub:someone/model'"):
        build("timm:hf-hub:someone/model")


def test_a_size_that_a_timm_network_refuses_is_an_error_that_names_one():
    pytest.importorskip("timm")
    with pytest.raises(DmlError, match="cannot be built for images of 50 pixels") as caught:
        build("timm:levit_128s", "none", 50)
    assert "input.crop=224" in caught.value.fix


def test_timm_weights_come_from_the_folder_of_downloads_or_are_asked_for_once(hub):
    pytest.importorskip("timm")
    save_file = pytest.importorskip("safetensors.torch").save_file
    name = "timm:mobilenetv3_small_050.lamb_in1k"
    with pytest.raises(DmlError, match="could not be downloaded") as caught:
        build(name, "imagenet", 32)
    assert "huggingface.co/timm/mobilenetv3_small_050.lamb_in1k/resolve/main/model.safetensors" in (
        caught.value.why
    )
    import timm

    torch.manual_seed(5)
    state = timm.create_model("mobilenetv3_small_050").state_dict()
    place = re.search(r"put the file here: (.*)", caught.value.fix)[1]
    save_file(state, place)
    assert same(build(name, "imagenet", 32).module, state)
    assert same(build(name, place, 32).module, state)  # the same file by its path


def test_missing_timm_names_the_command(monkeypatch):
    real = builtins.__import__

    def without_timm(name, *rest):
        if name == "timm":
            raise ModuleNotFoundError("No module named 'timm'", name="timm")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_timm)
    with pytest.raises(DmlError, match="need timm") as caught:
        build("timm:resnet18")
    assert caught.value.fix == "Install it: pip install timm"


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


def test_positions_of_a_vit_file_are_resized_to_the_images(tmp_path, monkeypatch):
    from trainer.networks.vision import torchvision

    def tiny(image_size=224, **_):
        return torchvision.models.VisionTransformer(image_size, 16, 1, 2, 768, 32)

    def tiny_model(name, weights=None, **options):
        return tiny(**options)

    torch.save(tiny(64).state_dict(), tmp_path / "w.pth")
    monkeypatch.setattr(torchvision.models, "get_model", tiny_model)
    built = build("vit_b_16", str(tmp_path / "w.pth"), 96)
    assert built.module.encoder.pos_embedding.shape == (1, 6 * 6 + 1, 768)
    saved = torch.load(tmp_path / "w.pth", weights_only=True)["encoder.pos_embedding"]
    assert torch.equal(built.module.encoder.pos_embedding[:, 0], saved[:, 0])  # the class token
    with torch.no_grad():
        assert built.module.eval()(torch.rand(2, 3, 96, 96)).shape == (2, 768)


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


# torchvision's operators

FAKE = """
import importlib, sys, types
real = importlib.import_module
calls = []
def fake(name, *rest):
    if name != "torchvision":
        return real(name, *rest)
    calls.append(name)
    {answer}
importlib.import_module = fake
"""


def test_operators_are_not_declared_where_torchvision_imports():
    answer = "return types.ModuleType('torchvision')"
    run(
        FAKE.format(answer=answer)
        + "from trainer.networks import vision\nimport torch\n"
        + "assert calls == ['torchvision'] and not vision.declared\n"
        + "assert not hasattr(torch.ops.torchvision, 'qnms')"
    )


def test_operators_are_declared_after_the_import_failed_on_them():
    answer = """
    if len(calls) == 1:
        sys.modules['torchvision.half'] = types.ModuleType('torchvision.half')
        raise RuntimeError('operator torchvision::nms does not exist')
    assert 'torchvision.half' not in sys.modules
    return types.ModuleType('torchvision')
"""
    run(
        FAKE.format(answer=answer)
        + "from trainer.networks import vision\nimport torch\n"
        + "assert len(calls) == 2 and len(vision.declared) == 1\n"
        + "assert hasattr(torch.ops.torchvision, 'nms') and hasattr(torch.ops.torchvision, 'qnms')"
    )


def test_torchvision_imports_here_without_a_warning():
    code = "from trainer.networks.vision import torchvision; import torchvision.transforms.v2"
    assert run(code) == ""


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (
            "ModuleNotFoundError('No module named torchvision', name='torchvision')",
            "needs torchvision",
        ),
        ("RuntimeError('built for another torch')", "cannot be imported"),
    ],
)
def test_other_failures_of_the_import_are_told_and_nothing_is_declared(raised, words):
    told = run(
        FAKE.format(answer=f"raise {raised}")
        + "from retrieval.errors import DmlError\n"
        + "try:\n    from trainer.networks import vision\n"
        + "except DmlError as error:\n    print(error)\n"
        + "import torch\nassert not hasattr(torch.ops.torchvision, 'qnms')"
    )
    assert words in told
    assert 'pip install -c constraints.txt ".[cpu]"' in told
