"""BN-Inception ("Inception v2"): Ioffe and Szegedy 2015, as ported from Caffe.

Layers have the names of the public weight files, those of Cadene's pretrained-models.pytorch and of
the Group Loss code, so that these files are loaded as they are.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.networks import weights
from trainer.networks.entry import Backbone, Entry

URL = "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"
Block = tuple[int, tuple[int, int], tuple[int, int], int]
# Channels of each block: 1x1; 3x3 and what goes into it; two 3x3 and what goes into them; pooling.
# Blocks without a 1x1 halve the size and pass the pooled maps on. All others average, but the last.
BLOCKS: dict[str, Block] = {
    "3a": (64, (64, 64), (64, 96), 32),
    "3b": (64, (64, 96), (64, 96), 64),
    "3c": (0, (128, 160), (64, 96), 0),
    "4a": (224, (64, 96), (96, 128), 128),
    "4b": (192, (96, 128), (96, 128), 128),
    "4c": (160, (128, 160), (128, 160), 128),
    "4d": (96, (128, 192), (160, 192), 128),
    "4e": (0, (128, 192), (192, 256), 0),
    "5a": (352, (192, 320), (160, 224), 128),
    "5b": (352, (192, 320), (192, 224), 128),
}


class BNInception(nn.Module):
    """(B, 3, H, W), RGB -> (B, 1024). Any size from 7 pixels on; the weights are for 224.

    The public weights are those of a Caffe network, which takes BGR: the first thing that happens
    is that the colours change places.
    """

    def __init__(self) -> None:
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        channels = self._add("conv2_3x3", 64, 192, 3)
        for name, block in BLOCKS.items():
            channels = self._add_block(f"inception_{name}_", channels, block)

    def _add(self, name: str, before: int, after: int, kernel: int, stride: int = 1) -> int:
        conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2)
        self.add_module(name, conv)
        self.add_module(f"{name}_bn", nn.BatchNorm2d(after))
        return after

    def _add_block(self, name: str, before: int, block: Block) -> int:
        """Add the layers of a block; return how many channels it gives."""
        single, three, double, pooled = block
        stride = 1 if single else 2
        total = self._add(f"{name}1x1", before, single, 1) if single else before
        self._add(f"{name}3x3_reduce", before, three[0], 1)
        total += self._add(f"{name}3x3", *three, 3, stride)
        self._add(f"{name}double_3x3_reduce", before, double[0], 1)
        self._add(f"{name}double_3x3_1", *double, 3)
        total += self._add(f"{name}double_3x3_2", double[1], double[1], 3, stride)
        return total + (self._add(f"{name}pool_proj", before, pooled, 1) if pooled else 0)

    def forward(self, images: Tensor) -> Tensor:
        x = self._conv("conv1_7x7_s2", images.flip(1))
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)
        x = self._conv("conv2_3x3", self._conv("conv2_3x3_reduce", x))
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)
        for name in BLOCKS:
            x = self._block(f"inception_{name}_", x)
        return x.mean((2, 3))

    def _conv(self, name: str, x: Tensor) -> Tensor:
        return F.relu(getattr(self, f"{name}_bn")(getattr(self, name)(x)), inplace=True)

    def _block(self, name: str, x: Tensor) -> Tensor:
        three = self._conv(f"{name}3x3", self._conv(f"{name}3x3_reduce", x))
        double = self._conv(f"{name}double_3x3_1", self._conv(f"{name}double_3x3_reduce", x))
        double = self._conv(f"{name}double_3x3_2", double)
        if not hasattr(self, f"{name}1x1"):
            # As ceil_mode does for maps of even sides; those of odd sides fit the convolutions too.
            # Nothing is negative after ReLU, so that zeros beside the map change no maximum.
            return torch.cat([three, double, F.max_pool2d(F.pad(x, (0, 2, 0, 2)), 3, 2)], 1)
        last = name == "inception_5b_"
        pooled = F.max_pool2d(x, 3, 1, 1) if last else F.avg_pool2d(x, 3, 1, 1)
        pooled = self._conv(f"{name}pool_proj", pooled)
        return torch.cat([self._conv(f"{name}1x1", x), three, double, pooled], 1)


def bninception(entry: Entry, source: str, image_size: int) -> Backbone:
    """BN-Inception without its classifier; its weights take pixels of 0 to 255 minus a mean."""
    module = BNInception()
    notes = weights.fill(module, source, entry.name, URL)
    return Backbone(module, entry.features, *entry.normalisation, notes)
