"""python -m benchmarks.embed: images on disk to an embedding file, end to end, to RESULTS.md.

`--images 16 --rounds 1 --memory 500,1000 --dry` tries it in a minute and records nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.loader import photo
from benchmarks.measure import machine, record, resident, table
from exporter.embedding.engine import Engine, lanes_and_threads
from exporter.embedding.writing import Embedded, EmbedSettings, embed
from exporter.onnx.metadata import Preprocessing, to_properties
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from trainer.data.datasets.records import DataSet, build

DISTINCT, BATCH = 24, 8
SMALL, LARGE = (500, 375), (1500, 1000)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREPARED = Preprocessing(256, True, 224, "bilinear", MEAN, STD)
TINY = Preprocessing(36, True, 32, "bilinear", MEAN, STD)


def write_network(backbone: str, path: Path, prepared: Preprocessing, dim: int = 0) -> None:
    from exporter.onnx.trace import write_model
    from trainer.networks.embedder import Embedder

    embedder = Embedder(backbone, dim=dim, image_size=prepared.crop).eval()
    values = {"schema": 1, "arch": backbone, "embedding_dim": embedder.dim, "l2_normalized": False}
    names = {"layout": "input_layout", "dtype": "input_dtype", "inside": "normalizes_input"}
    values |= {names.get(key, key): value for key, value in prepared.to_dict().items()}
    write_model(embedder, path, size=prepared.crop, properties=to_properties(values))


def write_photos(folder: Path, size: tuple[int, int], count: int) -> DataSet:
    """`count` files with the content of a few: they are in the system's cache either way."""
    folder.mkdir()
    for n in range(count):
        path = folder / f"{n:06d}.jpg"
        if n < DISTINCT:
            photo(n).resize(size).save(path, quality=90, subsampling="4:2:0")
        else:
            shutil.copyfile(folder / f"{n % DISTINCT:06d}.jpg", path)
    return listed(folder)


def listed(folder: Path) -> DataSet:
    names = sorted(path.name for path in folder.iterdir())
    return build("photos", folder, [(name, str(n % 10), "test") for n, name in enumerate(names)])


def take_turns(
    contenders: dict[str, Callable[[], object]], rounds: int, images: int
) -> dict[str, list[float]]:
    """Images/s in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            speeds[name].append(images / (time.perf_counter() - start))
            print(f"  {name}, round {number + 1}: {speeds[name][-1]:.2f} images/s", flush=True)
    return speeds


class Bench:
    """ResNet-50 as a session of all threads, and as several of one thread side by side."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.lanes, threads = lanes_and_threads()
        self.wide = Session(describe(model), "cpu")
        self.narrow = Session(describe(model), "cpu", threads)
        self.target = folder / "embeddings.h5"
        self.last: dict[str, Embedded] = {}
        for session in (self.wide, self.narrow):
            session.run(np.zeros((BATCH, 224, 224, 3), np.uint8))

    def bare(self, arrays: np.ndarray, lanes: int) -> None:
        batches = [arrays[at : at + BATCH] for at in range(0, len(arrays), BATCH)]
        if lanes == 1:
            for batch in batches:
                self.wide.run(batch)
            return
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(self.narrow.run, batches))

    def embed(self, data: DataSet, lanes: int) -> None:
        session = self.wide if lanes == 1 else self.narrow
        engine = Engine(session.run, session.dim, PREPARED, {}, lanes=lanes)
        settings = EmbedSettings(batch_size=BATCH, force=True)
        rows = {"test": np.arange(len(data))}
        self.last[data.root.name] = embed(engine, data, rows, self.target, settings)

    def plain(self, data: DataSet, batch: int) -> None:
        """What one writes first: Pillow decodes and resizes, the session runs, in turn."""
        rows = []
        for group in grouped([data.root / path for path in data.paths], batch):
            pictures = []
            for path in group:
                image = Image.open(path).convert("RGB")
                scale = 256 / min(image.size)
                image = image.resize(
                    (round(image.width * scale), round(image.height * scale)),
                    Image.Resampling.BILINEAR,
                )
                left, top = (image.width - 224) // 2, (image.height - 224) // 2
                pictures.append(np.asarray(image.crop((left, top, left + 224, top + 224))))
            rows.append(self.wide.run(np.stack(pictures)))
        np.concatenate(rows)


def grouped(values: list, size: int) -> Iterator[list]:
    return (values[at : at + size] for at in range(0, len(values), size))


def throughput(images: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_network("resnet50", folder / "m.onnx", PREPARED)
        small = write_photos(folder / "small", SMALL, images)
        large = write_photos(folder / "large", LARGE, images)
        arrays = np.random.default_rng(0).integers(0, 256, (images, 224, 224, 3), np.uint8)
        bench = Bench(folder / "m.onnx", folder)
        n = bench.lanes
        contenders = {
            "bare session": lambda: bench.bare(arrays, 1),
            f"bare, {n} in parallel": lambda: bench.bare(arrays, n),
            "500 x 375, one session": lambda: bench.embed(small, 1),
            f"500 x 375, {n} in parallel": lambda: bench.embed(small, n),
            "1500 x 1000, one session": lambda: bench.embed(large, 1),
            f"1500 x 1000, {n} in parallel": lambda: bench.embed(large, n),
            "1500 x 1000, plain loop, one by one": lambda: bench.plain(large, 1),
            f"1500 x 1000, plain loop, batches of {BATCH}": lambda: bench.plain(large, BATCH),
        }
        speeds = take_turns(contenders, rounds, images)
        writing = max(done.writing / done.seconds for done in bench.last.values())
    rows = [
        [
            key,
            f"{statistics.median(found):.1f}",
            ratio(speeds, key, "bare session"),
            ratio(speeds, key, "1500 x 1000, plain loop, one by one"),
            ratio(speeds, key, f"1500 x 1000, plain loop, batches of {BATCH}"),
        ]
        for key, found in speeds.items()
    ]
    return (
        f"ResNet-50 fp32, 224 x 224, batches of {BATCH}, from {images} JPEG files to "
        f"embeddings.h5. All variants take turns for {rounds} rounds; the table shows medians, and "
        "medians over the rounds of the ratios. The bare session runs ONNX Runtime on arrays in "
        "memory. The plain loop decodes and resizes with Pillow and calls session.run, one after "
        f"the other. dmltool runs {n} sessions in parallel. Goals: 0.9 of the speed of the bare "
        "session, and 1.3 times that of the plain loop on 1500 x 1000.\n\n"
        + table(["", "images/s", "/ bare session", "/ plain loop", "/ plain loop in batches"], rows)
        + f"\nWriting HDF5 took at most {100 * writing:.2f} % of the time (goal: 2 %).\n"
    )


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> str:
    pairs = zip(speeds[name], speeds[other], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


# Memory


def memory(sizes: list[int]) -> str:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_network("smallcnn", folder / "m.onnx", TINY, dim=512)
        for size in sizes:
            images = folder / str(size)
            images.mkdir()
            for n in range(DISTINCT):
                photo(n).resize((64, 48)).save(images / f"{n:07d}.jpg")
            for n in range(DISTINCT, size):
                os.link(images / f"{n % DISTINCT:07d}.jpg", images / f"{n:07d}.jpg")
            command = [
                sys.executable,
                "-m",
                "benchmarks.embed",
                "--one",
                str(folder / "m.onnx"),
                str(images),
            ]
            ran = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(ran.stdout)
            print(f"  {size:,}: {found}", flush=True)
            rows.append(
                [
                    f"{size:,}",
                    f"{found['seconds']:.0f}",
                    f"{found['before'] / 1e6:.0f}",
                    f"{found['peak'] / 1e6:.0f}",
                    f"{found['file'] / 1e6:.0f}",
                ]
            )
    return (
        "smallcnn, 32 x 32, 512 dimensions, JPEG files of 64 x 48. The peak is the memory of the "
        "whole process, including torch and ONNX Runtime. Goal: below 1,500 MB, independent of the "
        "number of images.\n\n"
        + table(["images", "seconds", "before, MB", "peak, MB", "file, MB"], rows)
    )


def one(model: Path, images: Path) -> None:
    """In a process of its own, whose peak is then that of this one file."""
    lanes, threads = lanes_and_threads()
    session, data, target = Session(describe(model), "cpu", threads), listed(images), None
    before = resident()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "x.h5"
        engine = Engine(session.run, session.dim, TINY, {}, lanes=lanes)
        done = embed(engine, data, {"test": np.arange(len(data))}, target)
        size = target.stat().st_size
    peak = resident(field="VmHWM")
    print(json.dumps({"seconds": done.seconds, "before": before, "peak": peak, "file": size}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="10000,100000")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(*map(Path, given.one))
        return
    versions = machine("numpy", "pillow", "h5py", "onnxruntime", "torch")
    sizes = [int(size) for size in given.memory.split(",") if size]
    text = f"{versions}.\n\n"
    text += throughput(given.images, given.rounds) if given.rounds else ""
    text += f"\n{memory(sizes)}" if sizes else ""
    print(text)
    if not given.dry:
        record("Embedding", text)


if __name__ == "__main__":
    main()
