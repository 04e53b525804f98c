"""A small network for small images: four convolutions."""

from torch import Tensor, nn

WIDTHS = (64, 64, 128, 256)


class SmallCNN(nn.Module):
    """(B, 3, H, W) -> (B, 256); images from 16 pixels on, meant for 28 to 64."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in widths:
            layers += [
                nn.Conv2d(before, width, 3, padding=1, bias=False),  # BatchNorm has a bias
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
            before = width
        layers[-1] = nn.AdaptiveAvgPool2d(1)
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(1)
