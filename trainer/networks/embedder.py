"""The network that is trained and exported: images to embeddings."""

import torch
from torch import Tensor, nn

from trainer.networks.backbones import build

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Embedder(nn.Module):
    """RGB in [0, 1] (B, 3, H, W) -> embeddings (B, dim), float32 also under autocast.

    The input normalisation is inside and part of the state dict, so that a network built with
    weights="none" and the state dict of another is that other network.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        backbone: str,
        *,
        weights: str = "none",
        dim: int = 0,
        batchnorm: bool = False,
        freeze_batchnorm: bool = False,
        channels: int = 3,
        image_size: int = 224,
    ) -> None:
        super().__init__()
        built = build(backbone, weights, image_size)
        self.notes = built.notes
        """What the user should know of the weights."""
        self.grey = channels == 1
        self.freeze_batchnorm = freeze_batchnorm
        self.dim = dim or built.features
        """Length of the embedding."""
        # Not `mean`: the ONNX exporter has an operator of that name.
        self.register_buffer("pixel_mean", torch.tensor(built.mean).view(1, 3, 1, 1))
        self.register_buffer("pixel_std", torch.tensor(built.std).view(1, 3, 1, 1))
        self.backbone = built.module
        self.projection = nn.Linear(built.features, dim) if dim else nn.Identity()
        self.norm = nn.BatchNorm1d(self.dim, affine=False) if batchnorm else nn.Identity()
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        if self.grey:
            images = images.mean(1, keepdim=True)  # (B, 1, H, W); the next line makes it 3 again
        images = (images - self.pixel_mean) / self.pixel_std
        features = self.projection(self.backbone(images))  # (B, dim)
        return self.norm(features.float())

    def train(self, mode: bool = True) -> "Embedder":
        """Frozen BatchNorm layers keep their statistics; their scale and shift still learn."""
        super().train(mode)
        if self.freeze_batchnorm:
            for module in self.backbone.modules():
                if isinstance(module, BATCHNORMS):
                    module.eval()
        return self

    @property
    def preprocessing(self) -> dict[str, list[float]]:
        """What forward does to the pixels, for the metadata of files."""
        return {
            name: [float(f"{value:.7g}") for value in values.flatten().tolist()]  # of float32
            for name, values in (("mean", self.pixel_mean), ("std", self.pixel_std))
        }
