"""A toy data set of small images, a model of it, and what its embedding file holds."""

import h5py
import numpy as np
from PIL import Image

from exporter.embedding.engine import Engine
from exporter.embedding.writing import EmbedSettings, embed
from exporter.onnx.metadata import Preprocessing
from tests.kills import Killed
from trainer.data.datasets.records import build

PREPARED = Preprocessing(12, True, 8, "bilinear", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
ATTRS = {"model": "quarters", "model_sha256": "abc", "normalized": False}
N, D = 50, 12


def quarters(images):
    """Mean colours of four quarters: for every row the same bits in any batch."""
    B, side = len(images), images.shape[1] // 2
    parts = images.reshape(B, 2, side, 2, side, 3).astype(np.float32)
    return parts.mean(axis=(2, 4)).reshape(B, D)


def draw(root, count=N, classes=5):
    rng, rows = np.random.default_rng(3), []
    for n in range(count):
        label, split = f"class {n % classes}", ("query", "gallery")[n % 2]
        path = f"{n:04d}.{'jpg' if n % 3 else 'png'}"
        colours = np.random.default_rng(n % classes).integers(100, 150, (2, 2, 3))
        pixels = np.kron(colours, np.ones((8, 10, 1))) + rng.normal(0, 120, (16, 20, 3))
        Image.fromarray(np.uint8(np.clip(pixels, 0, 255))).save(root / path)
        rows.append((path, label, split))
    return build("toy", root, rows)


def call(data, target, run=quarters, splits=None, lanes=1, attrs=ATTRS, **options):
    """Embed the data set by a model whose function is `run`."""
    splits = splits or {"test": np.arange(len(data))}
    others = {key: options.pop(key) for key in ("workers", "progress") if key in options}
    engine = Engine(run, D, PREPARED, attrs, lanes=lanes)
    settings = EmbedSettings(**{"batch_size": 8} | options)
    return embed(engine, data, splits, target, settings, **others)


def contents(path):
    """Everything in a file but the time of its creation."""
    found = {}
    with h5py.File(path) as file:
        found |= {f"@{key}": value for key, value in file.attrs.items() if key != "created"}
        file.visititems(
            lambda name, item: found.update(
                {name: (item.dtype, item[()].tolist())} if isinstance(item, h5py.Dataset) else {}
            )
        )
    return found


def stop_after(rows):
    """A model that breaks off, and the number of rows that it has seen."""
    seen = [0]

    def run(images):
        if seen[0] >= rows:
            raise Killed
        seen[0] += len(images)
        return quarters(images)

    return run, seen


def without_time(path):
    """The bytes of a file, without the time of its creation."""
    with h5py.File(path) as file:
        return path.read_bytes().replace(file.attrs["created"].encode(), b"")
