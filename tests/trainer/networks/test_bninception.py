"""BN-Inception: the numbers of the public network, its weight files, and the paper's Table 3."""

import numpy as np
import pytest
import torch

from retrieval.errors import DmlError
from trainer.losses import build as build_loss
from trainer.networks import weights
from trainer.networks.backbones import build
from trainer.networks.bninception import BNInception
from trainer.networks.embedder import Embedder


def drawn(module):
    """Weights by name from NumPy's generator, so that another program can draw the same."""
    rng = np.random.default_rng(0)
    state = {}
    for name, tensor in sorted(module.state_dict().items()):
        if name.startswith("last_linear") or name.endswith("num_batches_tracked"):
            continue
        values = rng.standard_normal(tuple(tensor.shape))
        if tensor.ndim == 4:
            values *= np.sqrt(2 / np.prod(tensor.shape[1:]))
        elif name.endswith(("running_var", "_bn.weight")):
            values = np.exp(0.2 * values)
        else:
            values *= 0.1
        state[name] = torch.from_numpy(values).float()
    return state


# Features 0, 128, ... of two images, computed by the bninception of pretrainedmodels 0.7.4 (PyPI)
# in float64 with the weights of `drawn`, for pixels of 0 to 255 as BGR minus 104, 117, 128.
PUBLIC = [
    [159.311058, 347.268547, 0.0, 80.8040022, 25.5176794, 0.0, 32.8347857, 211.739988],
    [174.928086, 354.692757, 0.0, 90.9685325, 21.4204802, 0.0, 29.144768, 249.943522],
]


def embedder(**options):
    """The network with the weights of `drawn`, on 64 x 64 pixels."""
    module = Embedder("bninception", image_size=64, **options).eval()
    module.backbone.load_state_dict(drawn(module.backbone), strict=False)
    return module


def test_features_are_those_of_the_public_network_for_its_preprocessing():
    pixels = torch.from_numpy(np.random.default_rng(1).uniform(0, 255, (2, 3, 64, 64)))
    with torch.no_grad():
        found = embedder().double()(pixels / 255)
    assert found.shape == (2, 1024)
    assert found[:, ::128].numpy() == pytest.approx(np.array(PUBLIC), rel=1e-5)


def test_the_recorded_preprocessing_is_that_of_caffe_in_rgb():
    said = embedder().preprocessing
    assert np.array(said["mean"]) * 255 == pytest.approx([128, 117, 104], rel=1e-6)
    assert np.array(said["std"]) * 255 == pytest.approx([1, 1, 1], rel=1e-6)


@pytest.mark.parametrize("size", [7, 31, 36, 72, 100])  # maps of odd sides at the two strides
def test_every_size_from_the_smallest_on_fits(size):
    module = build("bninception", "none", size).module.eval()
    assert module(torch.rand(2, 3, size, size)).isfinite().all()


TABLE_3 = {  # backbone: embedding, bias of the head, parameters on CUB, Cars and SOP
    "bninception": (512, False, (10_846_240, 10_845_216, 16_589_856)),  # CUB and Cars not swapped
    "densenet121": (0, True, (7_056_356, 7_054_306, 18_554_806)),
    "densenet161": (0, True, (26_692_900, 26_688_482, 51_473_462)),
    "densenet169": (0, True, (12_650_980, 12_647_650, 31_328_950)),
    "densenet201": (0, True, (18_285_028, 18_281_186, 39_834_806)),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_parameters_are_as_many_as_in_table_3_of_the_group_loss_paper(name):
    dim, bias, published = TABLE_3[name]
    with torch.device("meta"):
        network = Embedder(name, dim=dim, image_size=227)
        for classes, expected in zip((100, 98, 11_318), published, strict=True):
            loss = build_loss("group", classes, network.dim, bias=bias)
            found = sum(p.numel() for module in (network, loss) for p in module.parameters())
            assert found == expected


# Weight files


@pytest.fixture(scope="module")
def public():
    """The content of a weight file of the public code: 1000 classes, names as drawn."""
    state = drawn(BNInception())
    return state | {"last_linear.weight": torch.ones(1000, 1024), "last_linear.bias": torch.ones(5)}


def loaded(path):
    built = build("bninception", str(path), 64)
    state = built.module.state_dict()
    expected = drawn(built.module)
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    return built


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before torch 1.6"])
def test_the_weight_file_of_the_public_code_is_loaded(tmp_path, public, old):
    torch.save(public, tmp_path / "w.pth", _use_new_zipfile_serialization=not old)
    built = loaded(tmp_path / "w.pth")
    assert "left out last_linear.weight, last_linear.bias" in built.notes[0]


def test_vectors_of_the_oldest_files_may_have_an_axis_more(tmp_path, public):
    old = {k: v[None] if "_bn." in k else v for k, v in public.items()}
    torch.save(old, tmp_path / "w.pth")
    loaded(tmp_path / "w.pth")
    old["conv1_7x7_s2_bn.bias"] = torch.zeros(2, 64)
    torch.save(old, tmp_path / "w.pth")
    with pytest.raises(DmlError, match="does not hold the weights of bninception"):
        loaded(tmp_path / "w.pth")


def test_weights_by_name_come_from_the_folder_of_downloads(tmp_path, public, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(weights, "sha256", lambda path: "52deb4733")
    (tmp_path / "checkpoints").mkdir()
    torch.save(public, tmp_path / "checkpoints" / "bn_inception-52deb4733.pth")
    assert not loaded("imagenet").notes
