"""A small network for small images: four convolutions."""

from torch import Tensor, nn

WIDTHS = (32, 64, 128, 256)  # few at first: the first, largest maps take most of the time
CELLS = 2


class SmallCNN(nn.Module):
    """(B, 3, H, W) -> (B, 1024); images from 16 pixels on, meant for 28 to 64.

    Features are averaged over each quarter of the image. An average over all of it forgets where
    strokes are: on Omniglot letters held out of training, Recall@1 (cos) after 12 epochs, one
    seed, was 0.82 so and 0.93 with quarters for ce, 0.56 and 0.78 for spce.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in WIDTHS:
            layers += [
                nn.Conv2d(before, width, 3, padding=1, bias=False),  # BatchNorm has a bias
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2, ceil_mode=True),  # 28 -> 14 -> 7 -> 4
            ]
            before = width
        layers[-1] = nn.AdaptiveAvgPool2d(CELLS)
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(1)
