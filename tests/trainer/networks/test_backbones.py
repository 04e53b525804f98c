"""The table of backbones: each builds, and sizes and names that it cannot have are refused."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrieval.errors import DmlError
from trainer.networks.backbones import BACKBONES, build

ROOT = Path(__file__).parents[3]


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
