"""A folder of small pictures that a network can learn in seconds, and a config for it."""

import numpy as np
from PIL import Image

from trainer.config import Batches, Config, Data, Input, Network, Optimizer, Run, Schedule

NOISE = 0.35  # hard enough that epochs differ
SMALL = (
    "--backbone=smallcnn",
    "--weights=none",
    "--batch=16",
    "--epochs=2",
    "--device=cpu",
    "--workers=0",
    "--set=input.resize=0",
    "--set=input.crop=16",
    "--set=input.train_crop=center",
    "--set=data.val_fraction=0.2",
)
"""Options of `dmltool train` that make it take seconds on pictures."""
RUN_FILES = {
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "curves.png",
    "last.pt",
    "best.pt",
    "result.json",
    "validation.json",
}
"""What a finished run leaves in its folder."""


def draw_pictures(root, classes=10, images=8, size=16):
    """Stripes: a class is a direction and a colour, an image a phase and noise."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size]
    for c in range(classes):
        folder = root / f"class{c}"
        folder.mkdir(parents=True)
        colour = rng.uniform(0.3, 1, 3)
        for n in range(images):
            angle, phase = np.pi * c / classes, rng.uniform(0, 6)
            wave = 0.5 + 0.5 * np.sin(x * np.cos(angle) + y * np.sin(angle) + phase)
            picture = wave[..., None] * colour + rng.normal(0, NOISE, (size, size, 3))
            pixels = np.uint8(np.clip(picture, 0, 1) * 255)
            Image.fromarray(pixels).save(folder / f"{n}.png")
    return root


def small_config(pictures):
    """Three epochs of a second."""
    return Config(
        data=Data("folder", str(pictures), val_fraction=0.2, workers=0, cache="ram"),
        input=Input(resize=0, crop=16, train_crop="center", rotate=10.0, shift=0.05, flip=False),
        network=Network("smallcnn", dim=16),
        batches=Batches(size=16),
        optimizer=Optimizer(lr=3e-3),
        schedule=Schedule(epochs=3),
        run=Run(device="cpu", recall_at=(1, 2)),
    )
