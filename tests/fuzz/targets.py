"""What is attacked: for each kind of file its seeds, its mutations and what a user does with it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval.formats import FORMATS
from tests.fuzz import drawn, mutate, seeds
from tests.fuzz.child import OK, Limits, attempt

Mutate = Callable[[bytes, random.Random, Sequence[bytes]], bytes]
Open = Callable[[Path, random.Random], str]
TEXTS = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt", ".json", ".toml", ".ppm")
BARE = (".npy", ".fvecs", ".bvecs", ".faiss", ".index")  # their labels are in another file
SHARE = 0.5  # of mutations that know the format
KNOWING: dict[str, Mutate] = {
    ".npz": mutate.mutate_zip,
    ".pt": mutate.mutate_zip,
    ".pth": mutate.mutate_zip,
    ".npy": mutate.mutate_npy,
    ".gz": mutate.mutate_gzip,
    ".safetensors": mutate.mutate_safetensors,
    ".parquet": mutate.mutate_footer,
    ".pq": mutate.mutate_footer,
    ".png": mutate.mutate_png,
}


@dataclass(frozen=True)
class Target:
    name: str
    seeds: dict[str, bytes]
    open: Open
    weight: int = 1
    """How many files of 100 or so."""

    def damaged(self, rng: random.Random, folder: Path) -> tuple[str, bytes]:
        """A file name and its damaged content. One file of a hundred stays as it is."""
        name = rng.choice(sorted(self.seeds))
        data, suffix = self.seeds[name], Path(name).suffix
        others = [self.seeds[other] for other in sorted(self.seeds)]
        if rng.random() < 0.01:
            return name, data
        if suffix in (".h5", ".hdf5", ".he5") and rng.random() < 0.3:
            bits, place = rng.getrandbits(64), folder / ".drawn"
            place.unlink(missing_ok=True)
            # In a child: HDF5 may die already of making such a file.
            attempt(lambda: drawn.drawn_hdf5(random.Random(bits), place))
            return name, place.read_bytes() if place.exists() else data[:100]
        if suffix in TEXTS:
            return name, mutate.mutate_text(data, rng, others)
        if suffix in KNOWING and rng.random() < SHARE:
            with contextlib.suppress(Exception):  # a seed of another kind under this suffix
                return name, KNOWING[suffix](data, rng, others)
        return name, mutate.mutate(data, rng, others)


# Embedding files


def light(folder: Path) -> list[Target]:
    """Every format that is read without torch."""
    for format in FORMATS:
        format.load()
    files = seeds.embedding_files(folder / "embeddings")
    _evaluated(folder / "embeddings" / "plain.npz", None)  # compiles what is compiled
    weights = {"hdf5": 20, "arrow": 16, "npz": 8, "csv": 8}
    found = []
    for format in FORMATS:
        own = {name: data for name, data in files.items() if name.endswith(format.suffixes)}
        if own:
            found.append(Target(format.name, own, embedding, weights.get(format.name, 4)))
    return found


def embedding(path: Path, rng: random.Random) -> str:
    """Evaluated, or looked at in another way; the text says all that came of it."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if any(f.labels_only and name.endswith(f.suffixes) for f in FORMATS):
        return _evaluated(path.with_name("vectors.npy"), path)
    beside = path.with_name("beside.npy") if name.endswith(BARE) else None
    options = [] if beside is None else ["--labels", str(beside)]
    way = rng.random()
    if way < 0.75:
        return _evaluated(path, beside)
    if way < 0.85:
        return _command("inspect", str(path), *options)
    if way < 0.95:
        return _command("eval", str(path), *options, "--no-nmi", "--threads", "1")
    from retrieval.loading.load import read
    from retrieval.loading.sources import locate

    return _digest(read(locate(path), "labels"))


def _evaluated(path: Path, labels: Path | None) -> str:
    from retrieval.console import to_json
    from retrieval.evaluation import Settings, run
    from retrieval.loading.load import load
    from retrieval.problem import from_embeddings

    data = load(path, labels=labels)
    settings = Settings(nmi=False, resamples=10, threads=1, recall_at=(1, 4))
    result = run(from_embeddings(data), settings).result
    arrays = [a for s in data.splits.values() for a in (s.vectors, s.labels, s.paths)]
    return _digest(*arrays) + to_json(result)


def _command(*args: str) -> str:
    """As typed by a user; what a terminal would show must be harmless to it."""
    import cli

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        cli.main(["--debug", *args], prog_name="dmltool", standalone_mode=False)
    text = shown.getvalue()
    odd = sorted({c for c in text if not c.isprintable() and c != "\n"})
    if odd:
        raise AssertionError(f"control characters reach the terminal: {odd}")
    return text


def _digest(*arrays: np.ndarray | None) -> str:
    found = hashlib.sha256()
    for array in arrays:
        if array is not None:
            found.update(f"{array.dtype} {array.shape}".encode())
            # The bytes of an array of objects are addresses, which differ between processes.
            plain = array.tolist() if array.dtype.hasobject else array.tobytes()
            found.update(repr(plain).encode())
    return found.hexdigest()


# What needs torch

HEAVY = ("torch", "checkpoint", "model.onnx", "image", "settings", "run folder", "image table")


def heavy(folder: Path) -> list[Target]:
    from trainer.resolve import PRESETS

    for module in (
        "exporter.exporting",
        "exporter.embedding.embed",
        "trainer.run.train",
        "onnxruntime",
    ):
        importlib.import_module(module)
    run = folder / "run"
    made = attempt(lambda: str(seeds.run_folder(folder)), Limits(300, 8 << 30))
    assert made.kind == OK, made  # in a child: training may start threads
    checkpoints = {name: (run / name).read_bytes() for name in ("best.pt", "last.pt")}
    presets = {path.name: path.read_bytes() for path in sorted(PRESETS.glob("*.toml"))}
    presets["own.toml"] = (run / "config.toml").read_bytes()
    records = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "config.toml")}
    listed = "".join(f"images/class{n % 8}/{n % 4}.png,{n % 8}\n" for n in range(32))
    table = {"table.csv": f"path,label\n{listed}".encode()}
    return [
        Target("torch", seeds.torch_files(folder / "torch"), embedding, 8),
        Target("checkpoint", checkpoints, checkpoint, 4),
        Target("model.onnx", seeds.model_files(folder / "models"), model, 8),
        Target("image", seeds.image_files(folder / "pictures"), image, 12),
        Target("settings", presets, settings, 4),
        Target("run folder", records, run_view, 2),
        Target("image table", table, image_table, 2),
    ]


def checkpoint(path: Path, rng: random.Random) -> str:
    """As `export` opens it."""
    import torch

    from exporter.networks import load_member

    member = load_member(path)
    with torch.no_grad():
        member.embedder(torch.zeros(1, 3, 16, 16))
    return _digest(*(v.numpy() for v in member.embedder.state_dict().values()))


def model(path: Path, rng: random.Random) -> str:
    """As `embed` opens and runs it."""
    from exporter.onnx.foreign import Given, foreign_preprocessing
    from exporter.onnx.model import describe
    from exporter.onnx.session import Session

    described = describe(path)
    floats = described.dtype != "uint8"
    given = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)} if floats else {}
    prepared = described.preprocessing or foreign_preprocessing(described, Given(**given))
    session = Session(described, "cpu", threads=1, preprocessing=prepared)
    batch = np.random.default_rng(0).integers(0, 256, (2, prepared.crop, prepared.crop, 3), "u1")
    return _digest(session.run(batch))


def image(path: Path, rng: random.Random) -> str:
    from trainer.data.images import read_rgb

    return _digest(read_rgb(path), read_rgb(path, 4))


def settings(path: Path, rng: random.Random) -> str:
    from trainer.resolve import resolve

    return resolve(None, path, {})[0].to_toml()


def run_view(path: Path, rng: random.Random) -> str:
    """As `report --run` shows it."""
    from trainer.reporting import run_view as view

    return json.dumps(view(path.parent), allow_nan=False)


def image_table(path: Path, rng: random.Random) -> str:
    """As `train --dataset csv` and `embed` read it."""
    from trainer.data import datasets

    data = datasets.load("csv", path, test_fraction=0.0)
    return _digest(data.labels) + repr(data.paths[:3])


def lay_out(folder: Path, made: Path | None = None) -> None:
    """What some files need beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "vectors.npy", seeds.vectors())
    np.save(folder / "beside.npy", seeds.labels())
    if made is not None:
        for name in ("metrics.jsonl", "config.toml"):
            shutil.copy(made / "run" / name, folder)
        shutil.copytree(made / "images", folder / "images", dirs_exist_ok=True)
