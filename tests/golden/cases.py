"""Results that must not change unless a change of scores is intended.

Every case runs commands in an empty folder and returns something that JSON can hold. The recorded
results are in `results.json`; `python -m tests.golden.record` writes them anew.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import warnings
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import h5py
import numpy as np
from click.testing import CliRunner

from cli import main

Case = Callable[[Path], object]
CASES: dict[str, Case] = {}
MEASURED: set[str] = set()  # computed by networks or k-means: the last digits are the processor's

VERSIONS = ("dmltool", "numpy", "numba", "faiss")
TIMES = re.compile(r"(seconds|created|per_second|images_s|date|memory|dmltool|started|eta)")


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def measured(function: Case) -> Case:
    MEASURED.add(function.__name__)
    return case(function)


def machine() -> dict[str, str]:
    """What decides the last digits of a network's numbers."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": model[0] if model else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def call(*args: object) -> str:
    """The standard output of a command that must succeed."""
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exit_code == 0, f"{args}\n{done.output}"
    return done.stdout


def scored(*args: object) -> dict:
    result = json.loads(call("eval", *args, "--json"))
    result["settings"] = {k: v for k, v in result["settings"].items() if k not in VERSIONS}
    result["source"].pop("attrs", None)
    return result


def timeless(value: object) -> object:
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not TIMES.search(k)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def vectors(rows: int = 160, dim: int = 12, classes: int = 14, seed: int = 5):
    """Float32 vectors with identical rows, rows of zeros, and classes of one item; labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    labels[0] = classes  # a class of its own
    centres = rng.standard_normal((classes + 1, dim))
    X = (centres[labels] + 0.9 * rng.standard_normal((rows, dim))).astype(np.float32)
    X[10], X[11], X[40:44] = X[3], X[70], X[50]  # identical rows, some of another class
    X[20] = X[21] = 0
    X[60] = 2 * X[61]  # parallel rows
    return X, labels


def whole(rows: int = 150, dim: int = 4, seed: int = 6):
    """Small whole numbers: ties in plenty."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 3, (rows, dim)).astype(np.float32), rng.integers(0, 9, rows)


def names(labels: np.ndarray) -> np.ndarray:
    return np.array([f"class {label:02}" for label in labels])


@case
def leave_one_out_with_duplicates_and_zeros(folder: Path) -> object:
    X, labels = vectors()
    np.savez("x.npz", embeddings=X, labels=labels)
    found = scored("x.npz", "--no-nmi", "--per-class", "classes.csv")
    return {"result": found, "per_class": Path("classes.csv").read_text()}


@case
def ties_in_plenty(folder: Path) -> object:
    X, labels = whole()
    np.save("x.npy", X)
    np.savetxt("y.txt", labels, "%d")
    return scored("x.npy", "--labels", "y.txt", "--no-nmi", "--recall-at", "1,3,10,149")


@case
def integers_of_eight_bits(folder: Path) -> object:
    rng = np.random.default_rng(8)
    np.savez(
        "x.npz",
        embeddings=rng.integers(-9, 9, (120, 16)).astype(np.int8),
        labels=rng.integers(0, 7, 120),
    )
    return scored("x.npz", "--no-nmi")


@case
def double_precision(folder: Path) -> object:
    X, labels = vectors(seed=9)
    np.savez("x.npz", embeddings=X.astype(np.float64) * (1 + 1e-12), labels=names(labels))
    return scored("x.npz", "--no-nmi", "--distance", "l2")


@case
def query_and_gallery_of_two_files(folder: Path) -> object:
    X, labels = vectors(seed=10)
    np.savez("q.npz", embeddings=X[:50].astype(np.float16), labels=names(labels[:50]))
    np.savez("g.npz", embeddings=X[45:].astype(np.float16), labels=names(labels[45:]))
    return scored("q.npz", "--gallery", "g.npz", "--no-nmi", "--recall-at", "1,10,20")


@case
def query_and_gallery_with_ties(folder: Path) -> object:
    X, labels = whole(seed=11)
    with h5py.File("shop.h5", "w") as file:
        for split, part in (("query", slice(0, 60)), ("gallery", slice(60, None))):
            file[f"{split}/embeddings"], file[f"{split}/labels"] = X[part], labels[part]
    return scored("shop.h5", "--no-nmi")


@case
def sampled_queries(folder: Path) -> object:
    X, labels = vectors(rows=400, seed=12)
    np.savez("x.npz", embeddings=X, labels=labels)
    return scored("x.npz", "--no-nmi", "--queries", "60", "--seed", "3")


@case
def tables(folder: Path) -> object:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    X, labels = vectors(rows=80, dim=5, seed=13)
    X = np.round(X, 3).astype(np.float32)
    lines = [
        ",".join([*(f"{v:.3f}" for v in row), f"c{label}"])
        for row, label in zip(X, labels, strict=True)
    ]
    Path("x.csv").write_text(
        ",".join([*(f"d{n}" for n in range(5)), "label"]) + "\n" + "\n".join(lines) + "\n"
    )
    Path("x.jsonl").write_text(
        "".join(
            json.dumps({"embedding": row.tolist(), "label": int(label)}) + "\n"
            for row, label in zip(X, labels, strict=True)
        )
    )
    table = {"embedding": pa.array(X.tolist(), pa.list_(pa.float32())), "label": labels}
    pq.write_table(pa.table(table), "x.parquet")
    torch.save({"embeddings": torch.from_numpy(X), "labels": torch.from_numpy(labels)}, "x.pt")
    files = ("x.csv", "x.jsonl", "x.parquet", "x.pt")
    return {name: scored(name, "--no-nmi", "--no-map") for name in files}


@measured
def clusters(folder: Path) -> object:
    X, labels = vectors(rows=300, classes=9, seed=14)
    np.savez("x.npz", embeddings=X, labels=labels)
    found = scored("x.npz", "--nmi", "--seeds", "2", "--no-map")["distances"]
    for scores in found.values():
        scores.pop("kmeans_iterations")  # rounding may add one
    return found


def pair() -> None:
    X, labels = vectors(seed=15)
    # Products instead of a power, whose last digit is the processor's.
    Y = (X.astype(np.float64) * X * X).astype(np.float32)[:, ::-1]
    paths = np.array([f"{n:03}.png" for n in range(len(X))])
    order = np.random.default_rng(1).permutation(len(X))
    np.savez("a.npz", embeddings=X, labels=labels, paths=paths)
    np.savez("b.npz", embeddings=Y[order], labels=labels[order], paths=paths[order])


@case
def comparison(folder: Path) -> object:
    pair()
    found = json.loads(call("compare", "a.npz", "b.npz", "--json"))
    found["settings"] = {k: v for k, v in found["settings"].items() if k not in VERSIONS}
    return found


@case
def merged(folder: Path) -> object:
    pair()
    call("merge", "a.npz", "b.npz", "--out", "both.h5")
    return {"rows": summary_of("both.h5"), "result": scored("both.h5", "--no-nmi")}


@case
def report_view(folder: Path) -> object:
    pair()
    call("report", "a.npz", "--compare", "b.npz", "--no-nmi", "--map", "none", "--out", "r.html")
    page = Path("r.html").read_text()
    [text] = re.findall(r'<script type="application/json" id="view">(.*?)</script>', page, re.S)
    view = timeless(json.loads(text))
    view["result"]["settings"] = {}
    view.pop("provenance")
    return view


# A preset of its own name: the default for own images may change.
PHOTOS = (
    "--preset",
    "photos-ce",
    "--threads",
    "1",
    "--dataset",
    "folder",
    "--data",
    "photos",
    "--backbone",
    "smallcnn",
    "--weights",
    "none",
    "--set",
    "network.dim=16",
    "--set",
    "input.resize=0",
    "--set",
    "input.crop=16",
    "--set",
    "input.train_crop=center",
    "--epochs",
    "1",
    "--workers",
    "0",
    "--device",
    "cpu",
    "--set",
    "data.val_fraction=0.2",
)


def trained(loss: str, *more: str) -> object:
    import torch

    from tests.trainer.small import draw_pictures

    torch.set_num_threads(1)
    draw_pictures(Path("photos"), classes=10, images=6)
    call("train", *PHOTOS, "--loss", loss, "--out", "run", *more)
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    state = torch.load("run/best.pt", weights_only=True)["embedder"]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values()))
    return {
        "metrics": timeless(metrics),
        "weights": {key: float(value.double().sum()) for key, value in state.items()},
        "sha256": digest.hexdigest(),
    }


@measured
def trained_with_ce(folder: Path) -> object:
    return trained("ce", "--batch", "16")


@measured
def trained_with_spce(folder: Path) -> object:
    return trained("spce", "--batch", "16")


@measured
def trained_with_group(folder: Path) -> object:
    return trained("group", "--batch", "4x4")


@measured
def trained_with_every_other_loss(folder: Path) -> object:
    """Of each loss, the log and the digest of the weights."""
    from trainer.losses import LOSSES

    found = {}
    for entry in LOSSES:
        if entry.name not in ("ce", "spce", "group"):
            (folder / entry.name).mkdir()
            # The weight that pce computes is too small for so small a batch.
            with chdir(folder / entry.name), warnings.catch_warnings(action="ignore"):
                result = trained(entry.name, "--batch", "4x4")
            found[entry.name] = {key: result[key] for key in ("metrics", "sha256")}
    return found


@measured
def exported_embeddings(folder: Path) -> object:
    trained("ce", "--batch", "16")
    call("export", "run")
    with h5py.File("run/embeddings.h5") as file:
        return {
            "rows": file["test/embeddings"][...].astype(np.float64).tolist(),
            "labels": file["test/labels"][...].tolist(),
        }


def summary_of(path: str) -> object:
    """The rows of an embedding file: their digest, their sum by column, and the first two."""
    with h5py.File(path) as file:
        rows, labels = file["test/embeddings"][...], file["test/labels"][...]
    return {
        "dtype": str(rows.dtype),
        "shape": list(rows.shape),
        "sum": rows.astype(np.float64).sum(axis=0).tolist(),
        "first": rows[:2].astype(np.float64).tolist(),
        "labels": labels.tolist(),
        "sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
    }


def exported(*args: str, out: str) -> object:
    """What an export says and writes, without times, sizes and hashes of the model."""
    told = json.loads(call("export", *args, "--out", out, "--threads", "1", "--json"))
    found: dict[str, object] = {"rows": summary_of(f"{out}/embeddings.h5")}
    if "model" in told:
        found["parity"] = told["model"]["parity"]
        rows = told["model"]["precisions"]
        found["recalls"] = [[row["precision"], row["recall"], row["changed"]] for row in rows]
    if told["embeddings"]["recall"]:
        found["half"] = told["embeddings"]["recall"]
    return found


@measured
def exported_in_several_ways(folder: Path) -> object:
    trained("ce", "--batch", "16")
    found = {
        "half": exported("run", "--half", out="half"),
        "normalized": exported("run", "--normalize", "--input", "float-nchw", out="unit"),
        "fp16": exported("run", "--precision", "fp16", "--max-recall-drop", "50", out="fp16"),
        "torch": exported("run", "--no-onnx", "--backend", "torch", out="torch"),
    }
    model = "half/model.onnx"
    call("embed", model, "photos", "--out", "all.h5", "--threads", "1", "--batch-size", "7")
    return found | {"embedded": summary_of("all.h5")}


@measured
def exported_ensemble(folder: Path) -> object:
    trained("ce", "--batch", "16")
    other = ("--out", "other", "--seed", "7", "--set", "network.dim=8")
    call("train", *PHOTOS, "--loss", "spce", "--batch", "16", *other)
    return {
        "plain": exported("run", "other", out="both"),
        "normalized": exported("run", "other", "--normalize", out="unit"),
    }
