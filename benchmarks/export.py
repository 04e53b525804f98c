"""python -m benchmarks.export throughput time int8=RUN ...: models, into RESULTS.md.

RUN is the folder of a trained network; several are compared in one table. `dry` prints instead of
recording; `small` does so with smaller networks and fewer rounds, to try this file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import alternate, machine, record, table
from exporter import parity
from exporter.image_samples import CALIBRATION, calibration_images, readable
from exporter.networks import load_member
from exporter.onnx.metadata import describe_checkpoint, to_properties
from exporter.onnx.precision import compare, to_fp16, to_int8
from exporter.onnx.session import Session
from exporter.onnx.trace import write_model
from trainer.config import Config, Data, Input, Network
from trainer.networks.embedder import Embedder
from trainer.run import checkpoint
from trainer.run.setup import load_data
from trainer.run.state import preprocessing

PACKAGES = ("torch", "onnx", "onnxruntime", "onnxscript")
BATCH = 8


def config_of(backbone: str, size: int) -> Config:
    return Config(
        data=Data("glyphs", options={"size": size}),
        input=Input(resize=0, crop=size, train_crop="center"),
        network=Network(backbone, weights="none", dim=512),
    )


def state_of(config: Config) -> tuple[Embedder, dict]:
    """An untrained network and its checkpoint, with statistics that let images through."""
    torch.manual_seed(0)
    size = config.input.crop
    embedder = Embedder(config.network.backbone, dim=config.network.dim, image_size=size)
    for module in embedder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        embedder(torch.rand(BATCH, 3, size, size))
    data = load_data(config)
    untrained = {key: kind() for key, kind in checkpoint.KEYS.items()}
    return embedder.eval(), untrained | {
        "config": config.to_dict(),
        "embedder": embedder.state_dict(),
        "label_names": [data.label_names[c] for c in data.classes("train")],
        "preprocessing": embedder.preprocessing | preprocessing(config),
    }


def throughput(small: bool, dry: bool) -> None:
    """The same arrays of bytes through torch and through models of each precision."""
    name, size, rounds, batches = ("resnet18", 64, 2, 4) if small else ("resnet50", 224, 7, 4)
    embedder, state = state_of(config_of(name, size))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batches * BATCH, size, size, 3), np.uint8)
    parts = [images[at : at + BATCH] for at in range(0, len(images), BATCH)]

    def eager() -> None:
        with torch.inference_mode():
            for part in parts:
                embedder(torch.from_numpy(part).permute(0, 3, 1, 2).contiguous().float() / 255)

    with tempfile.TemporaryDirectory() as folder:
        paths = {kind: Path(folder) / f"{kind}.onnx" for kind in ("fp32", "fp16", "int8")}
        properties = to_properties(describe_checkpoint(state, "", embedder.dim))
        plain = write_model(embedder, paths["fp32"], size=size, properties=properties)
        models = {
            "fp32": plain,
            "fp16": to_fp16(plain, paths["fp16"]),
            "int8": to_int8(plain, paths["int8"], images),
        }
        sessions = {kind: Session(model, "cpu") for kind, model in models.items()}
        sizes = {kind: path.stat().st_size for kind, path in paths.items()}
    last = parity.torch_runner(embedder)
    contenders = {
        "torch eager": eager,
        "torch, channels_last": lambda: [last(part) for part in parts],
        **{
            f"ONNX Runtime {kind}": lambda s=session: [s.run(part) for part in parts]
            for kind, session in sessions.items()
        },
    }
    for run in contenders.values():
        run()
    done = alternate(contenders, rounds)
    base = done["torch eager"]["seconds"]
    goals = {"ONNX Runtime fp32": "1.5", "ONNX Runtime int8": "3"}
    rows = [
        [
            each,
            f"{len(images) / found['seconds']:.1f}",
            f"{base / found['seconds']:.2f}",
            goals.get(each, ""),
            f"{sizes[each.split()[-1]] / 1e6:.1f}" if "ONNX" in each else "",
        ]
        for each, found in done.items()
    ]
    show(
        f"Throughput of models: {name}, {size} x {size}, batch {BATCH}",
        f"{machine(*PACKAGES)}. From images in memory to embeddings of 512 dimensions. The "
        f"programs take turns, with {len(images)} images per turn; medians of {rounds}.\n\n"
        + table(["", "images/s", "relative to torch eager", "goal", "MB"], rows),
        dry,
    )


def export_time(small: bool, dry: bool) -> None:
    """The whole command, from the shell, with all parity checks and without embeddings."""
    rows = []
    for name, size, goal in (("smallcnn", 32, 10), ("resnet50", 224, 60))[: 1 if small else 2]:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder)
            checkpoint.save(run, state_of(config_of(name, size))[1], best=True)
            seconds = []
            for _ in range(1 if small else 3):
                command = ["export", str(run), "--no-embeddings", "--force", "--json"]
                start = time.perf_counter()
                done = subprocess.run(
                    [Path(sys.executable).parent / "dmltool", *command], capture_output=True
                )
                seconds.append(time.perf_counter() - start)
                if done.returncode:
                    sys.exit(done.stderr.decode())
            model = json.loads(done.stdout)["model"]
            found = model["parity"]
        rows.append(
            [
                f"{name}, {size} x {size}",
                f"{np.median(seconds):.1f}",
                f"under {goal}",
                f"{found['images']:,}",
                f"{found['max_abs']:.1e}",
                f"{found['min_cosine']:.8f}",
                f"{100 * found['agreement']:.2f} %",
                f"{model['bytes'] / 1e6:.1f}",
            ]
        )
        print(rows[-1], flush=True)
    head = [
        "",
        "seconds",
        "goal",
        "images compared",
        "largest difference",
        "lowest cosine",
        "same neighbour",
        "MB",
    ]
    show(
        "Export with all parity checks",
        f"{machine(*PACKAGES)}. Time of `dmltool export RUN --no-embeddings`, median of 3, for "
        f"networks with random weights.\n\n{table(head, rows)}",
        dry,
    )


def int8(runs: list[Path], small: bool, dry: bool) -> None:
    """What precision does to retrieval with trained networks, on all of their test images."""
    rows = []
    for run in runs:
        member = load_member(run)
        data = load_data(member.config)
        said = describe_checkpoint(member.state, member.sha256, member.embedder.dim)
        with tempfile.TemporaryDirectory() as folder:
            paths = {kind: Path(folder) / f"{kind}.onnx" for kind in ("fp32", "fp16", "int8")}
            size = member.config.input.crop
            plain = write_model(
                member.embedder, paths["fp32"], size=size, properties=to_properties(said)
            )
            spec = plain.preprocessing
            calibration = calibration_images(data, spec)
            models = {
                "fp32": plain,
                "fp16": to_fp16(plain, paths["fp16"]),
                "int8": to_int8(plain, paths["int8"], calibration),
            }
            tested = data.rows("test")[: 400 if small else None]
            images, tested = readable(data, tested, spec)
            found = compare(models, images, data.labels[tested], provider="cpu", batch_size=32)
        network = f"{data.name}, {member.config.network.backbone}, {member.config.loss.name}"
        rows += [
            [
                network,
                row["precision"],
                f"{len(images):,}",
                f"{100 * row['recall']:.2f}",
                f"{100 * (row['recall'] - found[0]['recall']):+.2f}",
                f"{100 * row['changed']:.1f} %",
                f"{row['images_per_second']:,.0f}",
                f"{row['bytes'] / 1e6:.2f}",
            ]
            for row in found
        ]
    head = [
        "network",
        "precision",
        "test images",
        "Recall@1",
        "difference, points",
        "changed neighbours",
        "images/s",
        "MB",
    ]
    show(
        "Precision and retrieval",
        f"{machine(*PACKAGES)}. Trained networks, Recall@1 (cos), leave-one-out on the test set; "
        f"int8 is calibrated on {CALIBRATION} training images. Goal: int8 loses at most 1 point."
        "\n\n" + table(head, rows),
        dry,
    )


def show(title: str, text: str, dry: bool) -> None:
    if dry:
        print(f"{title}\n\n{text}")
    else:
        record(title, text)


def main(words: list[str]) -> None:
    small = "small" in words
    dry = small or "dry" in words
    runs = [Path(word.removeprefix("int8=")) for word in words if word.startswith("int8=")]
    named = {word for word in words if not word.startswith("int8=")} - {"small", "dry"}
    if unknown := named - {"throughput", "time"}:
        sys.exit(f"no section {', '.join(sorted(unknown))}: throughput, time, int8=RUN, dry, small")
    nothing = not named and not runs
    if nothing or "throughput" in named:
        throughput(small, dry)
    if nothing or "time" in named:
        export_time(small, dry)
    if runs:
        int8(runs, small, dry)


if __name__ == "__main__":
    main(sys.argv[1:])
