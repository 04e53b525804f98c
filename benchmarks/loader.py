"""python -m benchmarks.loader: reading images for training against torchvision, to RESULTS.md."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from benchmarks.measure import machine, record, table
from trainer import datasets, sampling, transforms
from trainer.config import Input
from trainer.images import read_rgb
from trainer.loading import Loader, open_images

PHOTOS, WIDTH, HEIGHT = 48, 1500, 1000
ROUNDS = 9
RECIPE = Input(resize=256, crop=224, scale=(0.16, 1.0), ratio=(0.75, 4 / 3), flip=True)
STILL = Input(resize=0, crop=32, train_crop="center", flip=False)
AFFINE = Input(
    resize=0, crop=32, train_crop="center", flip=False, rotate=10.0, zoom=(0.85, 1.15),
    shear=6.0, shift=0.06,
)  # fmt: skip


def photo(seed: int) -> Image.Image:
    """Smooth noise at seven sizes, weaker the finer, as in photographs, and a few hard edges."""
    rng = np.random.default_rng(seed)
    total = np.full((HEIGHT, WIDTH, 3), 120, np.float32)
    for level in range(1, 8):
        cells = 4 * 2**level
        noise = rng.standard_normal((cells * 2 // 3, cells, 3), dtype=np.float32)
        noise = 0.7 * noise.mean(axis=2, keepdims=True) * 1.7 + 0.3 * noise  # mostly brightness
        for channel in range(3):
            layer = Image.fromarray(noise[..., channel]).resize((WIDTH, HEIGHT), Image.BICUBIC)
            total[..., channel] += 60 / 1.5**level * np.asarray(layer)
    for _ in range(12):
        x, y = rng.integers(0, WIDTH - 200), rng.integers(0, HEIGHT - 200)
        w, h = rng.integers(40, 400, 2)
        total[y : y + h, x : x + w] += rng.uniform(-60, 60, 3)
    return Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))


def interleaved(
    contenders: dict[str, Callable[[int, Path], object]], paths: list[Path]
) -> dict[str, list[float]]:
    """Seconds an image in each round; contenders take turns at every image."""
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for read in contenders.values():  # compile, import
        read(0, paths[0])
    for number in range(ROUNDS):
        spent = dict.fromkeys(contenders, 0.0)
        for place, path in enumerate(paths):
            for name, read in contenders.items():
                start = time.perf_counter()
                read(number * len(paths) + place, path)
                spent[name] += time.perf_counter() - start
        for name, seconds in spent.items():
            rounds[name].append(seconds / len(paths))
    return rounds


def photographs() -> str:
    from trainer.vision import torchvision

    T = torchvision.transforms
    theirs = T.Compose(
        [T.Resize(256), T.RandomResizedCrop(224, RECIPE.scale, RECIPE.ratio),
         T.RandomHorizontalFlip()]
    )  # fmt: skip
    still = T.Compose([T.Resize(256), T.CenterCrop(224)])

    def ours(key: int, path: Path) -> np.ndarray:
        image = transforms.for_training(read_rgb(path, RECIPE.resize), RECIPE, Random(key))
        return np.ascontiguousarray(image)

    def usual(key: int, path: Path) -> np.ndarray:
        with Image.open(path) as file:
            return np.asarray(theirs(file.convert("RGB")))

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.jpg" for n in range(PHOTOS)]
        for n, path in enumerate(paths):
            photo(n).save(path, quality=90, subsampling="4:2:0")
        size = statistics.mean(path.stat().st_size for path in paths)
        rounds = interleaved({"dmltool": ours, "usual": usual}, paths)
        apart = [
            np.abs(
                transforms.for_testing(read_rgb(path, RECIPE.resize), RECIPE).astype(int)
                - np.asarray(still(Image.open(path).convert("RGB")))
            ).mean()
            for path in paths
        ]
    ratios = [b / a for a, b in zip(rounds["dmltool"], rounds["usual"], strict=True)]
    names = {"dmltool": "dmltool", "usual": "Image.open().convert('RGB'), torchvision"}
    rows = [
        [label, f"{1 / statistics.median(rounds[name]):.0f}",
         f"{statistics.median(rounds['usual']) / statistics.median(rounds[name]):.2f}"]
        for name, label in names.items()
    ]  # fmt: skip
    print(f"ratios of the rounds: {', '.join(f'{r:.2f}' for r in sorted(ratios))}")
    return (
        f"One process, {PHOTOS} generated JPEGs of {WIDTH} x {HEIGHT} at quality 90, 4:2:0, "
        f"{size / 1000:.0f} kB each. Resize(256), RandomResizedCrop(224), flip; both take turns at "
        f"every image, {ROUNDS} rounds. Goal: 2 times the images/s.\n\n"
        + table(["", "images/s", "ratio"], rows)
        + f"\nRatio of single rounds: {min(ratios):.2f} to {max(ratios):.2f}. Resize and centre "
        f"crop of the two differ by {statistics.mean(apart):.2f} of 255 on average, because "
        "dmltool lets the JPEG decoder halve the image first.\n"
    )


def in_memory() -> str:
    data = datasets.load("glyphs", None)
    source = open_images(data, STILL)
    rows, targets = data.rows("train"), data.targets("train")
    out = []
    for name, spec in (("no random change", STILL), ("turned, scaled, slanted, shifted", AFFINE)):
        with Loader(source, spec, rows, targets, 0) as loader:
            seconds = []
            for epoch in range(ROUNDS + 1):  # the first compiles
                plan = sampling.random_batches(len(rows), 128, 0, epoch)
                keys = sampling.keys(0, epoch, *plan.shape)
                start = time.perf_counter()
                for _ in loader.epoch(plan, keys):
                    pass
                seconds.append((time.perf_counter() - start) / plan.size)
        out.append([name, f"{1e6 * statistics.median(seconds[1:]):.1f}"])
    return "Images kept in memory, 32 x 32, no worker process, batches of 128:\n\n" + table(
        ["", "microseconds an image"], out
    )


if __name__ == "__main__":
    versions = machine("numpy", "pillow", "torch", "torchvision")
    text = f"{versions}.\n\n{photographs()}\n{in_memory()}"
    print(text)
    record("Loader", text)
