"""Networks of torchvision and timm without their classifiers."""

import builtins
import re

import pytest
import torch

from retrieval.errors import DmlError, install
from tests.trainer.networks.weights import same
from trainer.networks.backbones import BACKBONES, build


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
    assert caught.value.fix == install("extras")
