"""python -m benchmarks.loader: reading images for training against torchvision, to RESULTS.md."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from benchmarks.measure import machine, record, table
from trainer.config import Input
from trainer.data import datasets, sampling, transforms
from trainer.data.images import read_rgb
from trainer.data.loading import Loader
from trainer.data.source import open_images

SIZES = {(1500, 1000): 24, (4000, 3000): 6}  # of photographs, and how many of each
ROUNDS = 7
RECIPE = Input(resize=256, crop=224, scale=(0.16, 1.0), ratio=(0.75, 4 / 3), flip=True)
STILL = Input(resize=0, crop=32, train_crop="center", flip=False)
AFFINE = Input(
    resize=0,
    crop=32,
    train_crop="center",
    flip=False,
    rotate=10.0,
    zoom=(0.85, 1.15),
    shear=6.0,
    shift=0.06,
)


def photo(seed: int, width: int = 1500, height: int = 1000) -> Image.Image:
    """Smooth noise at eight sizes, weaker the finer, as in photographs, hard edges, and the noise
    of a sensor."""
    rng = np.random.default_rng(seed)
    total = np.full((height, width, 3), 120, np.float32)
    for level in range(1, 9):
        cells = 4 * 2**level
        noise = rng.standard_normal((cells * 2 // 3, cells, 3), dtype=np.float32)
        noise = 0.7 * noise.mean(axis=2, keepdims=True) * 1.7 + 0.3 * noise  # mostly brightness
        for channel in range(3):
            layer = Image.fromarray(noise[..., channel]).resize((width, height), Image.BICUBIC)
            total[..., channel] += 60 / 1.5**level * np.asarray(layer)
    for _ in range(60):
        x, y = rng.integers(0, width - 20), rng.integers(0, height - 20)
        w, h = rng.integers(5, 400, 2)
        total[y : y + h, x : x + w] += rng.uniform(-60, 60, 3)
    total += rng.normal(0, 5, (height, width, 1))
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


def ours(draft: int) -> Callable[[int, Path], np.ndarray]:
    spec = replace(RECIPE, draft=draft)

    def read(key: int, path: Path) -> np.ndarray:
        image = transforms.for_training(read_rgb(path, spec.short_side), spec, Random(key))
        return np.ascontiguousarray(image)

    return read


def grey_levels(path: Path, draft: int, interpolation: str = "bilinear") -> float:
    """Mean difference of evaluation's pixels from those of a JPEG decoded at full size."""
    spec = replace(RECIPE, draft=draft, interpolation=interpolation)
    full = transforms.for_testing(read_rgb(path), RECIPE).astype(int)
    return float(
        np.abs(transforms.for_testing(read_rgb(path, spec.short_side), spec) - full).mean()
    )


def photographs(width: int, height: int, count: int) -> str:
    from trainer.networks.vision import torchvision

    T = torchvision.transforms
    theirs = T.Compose(
        [
            T.Resize(256),
            T.RandomResizedCrop(224, RECIPE.scale, RECIPE.ratio),
            T.RandomHorizontalFlip(),
        ]
    )

    def usual(key: int, path: Path) -> np.ndarray:
        with Image.open(path) as file:
            return np.asarray(theirs(file.convert("RGB")))

    names = {
        "dmltool": ours(2),
        "dmltool, `input.draft=1`": ours(1),
        "dmltool, `input.draft=0`: full size": ours(0),
        "Image.open().convert('RGB'), torchvision": usual,
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.jpg" for n in range(count)]
        for n, path in enumerate(paths):
            photo(n, width, height).save(path, quality=90, subsampling="4:2:0")
        size = statistics.mean(path.stat().st_size for path in paths)
        rounds = interleaved(names, paths)
        apart = [statistics.mean(grey_levels(path, draft) for path in paths) for draft in (2, 1, 0)]
        cubic = statistics.mean(grey_levels(path, 0, "bicubic") for path in paths)
    *_, last = names
    rows = []
    for name, cost in zip(names, [*map("{:.2f}".format, apart), ""], strict=True):
        ratios = [b / a for a, b in zip(rounds[name], rounds[last], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        speed = f"{1 / statistics.median(rounds[name]):.0f}"
        rows.append([name, speed, f"{statistics.median(ratios):.2f}", spread, cost])
    return (
        f"{count} generated JPEGs of {width} x {height} at quality 90, 4:2:0, "
        f"{size / 1000:.0f} kB each. For comparison, bicubic instead of bilinear resizing "
        f"changes {cubic:.2f} grey levels.\n\n"
        + table(["", "images/s", "relative to torchvision", "range", "grey levels"], rows)
    )


def in_memory() -> str:
    data = datasets.load("glyphs", None)
    source = open_images(data, STILL)
    rows, targets = data.rows("train"), data.targets("train")
    out = []
    for name, spec in (("no augmentation", STILL), ("rotated, scaled, sheared, shifted", AFFINE)):
        with closing(Loader(replace(source, spec=spec), rows, targets, 0)) as loader:
            seconds = []
            for epoch in range(ROUNDS + 1):  # the first compiles
                plan = sampling.random_batches(len(rows), 128, 0, epoch)
                keys = sampling.keys(0, epoch, *plan.shape)
                start = time.perf_counter()
                for _ in loader.epoch(plan, keys):
                    pass
                seconds.append((time.perf_counter() - start) / plan.size)
        out.append([name, f"{1e6 * statistics.median(seconds[1:]):.1f}"])
    return "Images in memory, 32 x 32, no worker process, batches of 128:\n\n" + table(
        ["", "microseconds per image"], out
    )


if __name__ == "__main__":
    versions = machine("numpy", "pillow", "torch", "torchvision")
    parts = [photographs(*size, count) for size, count in SIZES.items()]
    about = (
        f"One process: Resize(256), RandomResizedCrop(224), flip. The programs take turns at every "
        f"image, for {ROUNDS} rounds; the table shows medians, and the range of the ratio over the "
        "rounds. The last column is the mean difference from JPEGs decoded at full size, in grey "
        "levels out of 255, for evaluation (resize, centre crop)."
    )
    text = "\n\n".join([f"{versions}.", about, *parts, in_memory()])
    print(text)
    record("Loader", text)
