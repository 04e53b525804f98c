"""What a run is: frozen dataclasses, one for each table of the TOML file.

Whatever is wrong with the values is reported together. `trainer.resolve` makes a config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from retrieval.errors import DmlError
from trainer.losses import LOSSES

INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "box", "nearest")


class BadSettings(DmlError):
    """Everything that is wrong with a configuration, a line each."""

    def __init__(self, what: str, problems: list[str], fix: str) -> None:
        super().__init__(what, "\n".join(problems), fix)
        self.problems = problems


@dataclass(frozen=True)
class Data:
    dataset: str = "glyphs"
    """A name of `dmltool list datasets`."""
    root: str = ""
    """The folder or file of the data set; `glyphs` needs none."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the reader of the data set takes, such as test_fraction for `folder`."""
    val_fraction: float = 0.1
    """The share of the training classes that is held out to pick the best epoch."""
    val_seed: int = 0
    """Which classes those are; not the seed of the run, so that seeds share a validation set."""
    min_images: int = 1
    """Training classes with fewer images are left out."""
    skip_bad: bool = False
    """Leave out images that cannot be read; else they stop the run before it starts."""
    cache: str = "auto"
    """Resized images are kept in `ram`, on `disk`, or not (`none`); auto: drawn ones in ram."""
    workers: int = -1
    """Processes that read images; -1: chosen by the device and the cache."""

    def problems(self) -> Iterator[str]:
        yield from one_of("data.cache", self.cache, ("auto", "none", "ram", "disk"))
        yield from within("data.val_fraction", self.val_fraction, 0, 0.9)
        yield from within("data.min_images", self.min_images, 1, 10**6)
        yield from within("data.workers", self.workers, -1, 1024)


@dataclass(frozen=True)
class Input:
    resize: int = 256
    """Length of the short side in pixels before cropping; 0: images stay as they are."""
    keep_ratio: bool = True
    """False: both sides become `resize`."""
    crop: int = 224
    """Sides of the square that the network sees; the centre in evaluation."""
    interpolation: str = "bilinear"
    """Of the resizing: bilinear, bicubic, lanczos or box, all antialiased; or nearest."""
    draft: int = 2
    """JPEGs may be decoded at 1/2, 1/4 or 1/8 of their size, while the short side stays at least
    so many times `resize`: the larger, the nearer to full decoding; 0: always at full size."""
    train_crop: str = "resized"
    """resized: a random part of `scale` and `ratio`, resized; random: a place; center."""
    scale: tuple[float, float] = (0.16, 1.0)
    """Share of the area that a `resized` crop takes."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Width over height of a `resized` crop before it is made square."""
    flip: bool = True
    """Mirror every other training image."""
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Largest change of brightness, contrast, saturation and hue."""
    rotate: float = 0.0
    """Largest turn in degrees."""
    zoom: tuple[float, float] = (1.0, 1.0)
    """Smallest and largest scaling of the content."""
    shear: float = 0.0
    """Largest slant in degrees."""
    shift: float = 0.0
    """Largest move, as a share of the side."""

    @property
    def short_side(self) -> int | None:
        """What the short side of a JPEG may be reduced to while it is decoded; None: nothing."""
        return self.resize * self.draft or None

    def problems(self) -> Iterator[str]:
        yield from one_of("input.interpolation", self.interpolation, INTERPOLATIONS)
        yield from one_of("input.train_crop", self.train_crop, ("resized", "random", "center"))
        yield from within("input.crop", self.crop, 8, 4096)
        yield from within("input.resize", self.resize, 0, 8192)
        yield from within("input.draft", self.draft, 0, 8)
        if 0 < self.resize < self.crop:
            yield f"input.crop = {self.crop} does not fit into input.resize = {self.resize}"
        for name, low, high in (("scale", 1e-4, 1), ("ratio", 0.01, 100), ("zoom", 0.05, 20)):
            pair = getattr(self, name)
            for value in pair:
                yield from within(f"input.{name}", value, low, high)
            if pair[0] > pair[1]:
                yield f"input.{name} = {list(pair)}: the smaller number comes first"
        for value in self.jitter[:3]:
            yield from within("input.jitter", value, 0, 1)
        yield from within("input.jitter (hue)", self.jitter[3], 0, 0.5)
        for name, high in (("rotate", 180), ("shear", 60), ("shift", 0.5)):
            yield from within(f"input.{name}", getattr(self, name), 0, high)


@dataclass(frozen=True)
class Network:
    backbone: str = "smallcnn"
    """A name of `dmltool list backbones`, or timm:NAME."""
    weights: str = "none"
    """`imagenet`, `none`, or a file of weights."""
    dim: int = 0
    """Length of the embedding by a linear projection; 0: what the backbone gives."""
    batchnorm: bool = False
    """BatchNorm1d without affine parameters on the embedding."""
    freeze_batchnorm: bool = False
    """The BatchNorm layers of the backbone keep their statistics."""
    channels: int = 3
    """1: the colours are averaged first."""

    def problems(self) -> Iterator[str]:
        yield from within("network.dim", self.dim, 0, 65_536)
        if self.channels not in (1, 3):
            yield f"network.channels = {self.channels}: 1 or 3"


@dataclass(frozen=True)
class Loss:
    name: str = "ce"
    """A name of `dmltool list losses`, or pml:NAME."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those of the loss, such as temperature for `group`."""
    classification_epochs: int = 0
    """The first epochs train plain cross-entropy on the head of the loss."""
    monitor: tuple[str, ...] = ()
    """Losses computed beside the one that trains: spce, pce."""

    def problems(self) -> Iterator[str]:
        yield from within("loss.classification_epochs", self.classification_epochs, 0, 10**6)
        for name in self.monitor:
            yield from one_of("loss.monitor", name, (e.name for e in LOSSES if e.monitor))


@dataclass(frozen=True)
class Batches:
    size: int = 128
    """Images drawn at random, each once in an epoch."""
    classes: int = 0
    """With `images`: batches of so many classes x images instead of `size`."""
    images: int = 0
    repeat: bool = False
    """A class with too few images gives some of them twice."""
    balance: bool = False
    """Without `classes` and `images`: they are chosen for a batch of about `size` images that the
    training classes can fill, at least 4 images a class where there are as many."""

    @property
    def total(self) -> int:
        return self.classes * self.images or self.size

    def problems(self) -> Iterator[str]:
        if bool(self.classes) != bool(self.images):
            yield "batches.classes and batches.images go together"
        for name in ("classes", "images"):
            yield from within(f"batches.{name}", getattr(self, name), 0, 65_536)
        yield from within("batches.size", self.size, 2, 1 << 20)
        if self.classes == self.images == 1:
            yield "batches.classes and batches.images are 1: one image cannot be trained on"


@dataclass(frozen=True)
class Optimizer:
    name: str = "adam"
    """sgd (with Nesterov's momentum where momentum is above 0), adam, radam or adamw."""
    lr: float = 1e-3
    momentum: float = 0.0
    """Of sgd."""
    weight_decay: float = 0.0
    """Only on weights of two dimensions and more."""
    loss_lr: float = 1.0
    """The loss's own parameters (heads, proxies) learn so many times faster."""
    clip: float = 0.0
    """Largest norm of the gradient; 0: any."""

    def problems(self) -> Iterator[str]:
        yield from one_of("optimizer.name", self.name, ("sgd", "adam", "radam", "adamw"))
        for name in ("lr", "weight_decay", "loss_lr", "clip"):
            yield from within(f"optimizer.{name}", getattr(self, name), 0, 1e6)
        yield from within("optimizer.momentum", self.momentum, 0, 0.9999)


@dataclass(frozen=True)
class Schedule:
    epochs: int = 30
    name: str = "cosine"
    """cosine: to 0; step: times `factor` after each of the `milestones`; constant."""
    warmup: int = 0
    """Steps over which the learning rate rises from 0; a tenth of the run at most."""
    milestones: tuple[int, ...] = ()
    """Epochs."""
    factor: float = 0.1

    def problems(self) -> Iterator[str]:
        yield from one_of("schedule.name", self.name, ("cosine", "step", "constant"))
        yield from within("schedule.epochs", self.epochs, 1, 10**6)
        yield from within("schedule.warmup", self.warmup, 0, 10**9)
        yield from within("schedule.factor", self.factor, 0, 1)
        for epoch in self.milestones:
            yield from within("schedule.milestones", epoch, 1, 10**6)


@dataclass(frozen=True)
class Run:
    seed: int = 0
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps, ..."""
    threads: int = 0
    """Of torch on a CPU; 0: a short trial chooses, and a resumed run keeps the number."""
    precision: str = "auto"
    """fp32, bf16 or fp16 of the network (the loss is float32); auto: bf16 on GPUs that have it."""
    channels_last: bool = True
    compile: bool = False
    deterministic: bool = False
    """Refuse operations whose result can differ from run to run, which only GPUs have; on a CPU
    the number of threads is left to no trial."""
    select: str = "val"
    """What picks the best epoch: val; test, as the papers do; last: nothing, the last is kept."""
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    """The K of Recall@K on the test set after training."""
    tensorboard: bool = False

    def problems(self) -> Iterator[str]:
        yield from one_of("run.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        yield from one_of("run.select", self.select, ("val", "test", "last"))
        yield from within("run.threads", self.threads, 0, 10**6)
        yield from within("run.seed", self.seed, 0, 2**63 - 1)
        for k in self.recall_at:
            yield from within("run.recall_at", k, 1, 10**9)


@dataclass(frozen=True)
class Config:
    data: Data = field(default_factory=Data)
    input: Input = field(default_factory=Input)
    network: Network = field(default_factory=Network)
    loss: Loss = field(default_factory=Loss)
    batches: Batches = field(default_factory=Batches)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        found = [text for part in fields(self) for text in getattr(self, part.name).problems()]
        if self.loss.classification_epochs > self.schedule.epochs:
            found.append(
                f"loss.classification_epochs = {self.loss.classification_epochs} is more than "
                f"schedule.epochs = {self.schedule.epochs}"
            )
        if found:
            raise BadSettings(
                f"The configuration has {len(found)} problem{'s' * (len(found) > 1)}.",
                found,
                "Change them with --set table.key=value, or in the file.",
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """As TOML has it: tuples are lists."""
        return {
            name: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in table.items()
            }
            for name, table in asdict(self).items()
        }

    def to_toml(self) -> str:
        tables = []
        for name, table in self.to_dict().items():
            lines = [f"{key} = {toml(value)}" for key, value in table.items()]
            tables.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(tables) + "\n"


def toml(value: Any) -> str:
    """A value on one line. JSON's strings and numbers are TOML's; its escape for DEL is added."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{k if k.isidentifier() else toml(k)} = {toml(v)}" for k, v in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def one_of(key: str, value: object, valid: Iterable[str]) -> Iterator[str]:
    if value not in (valid := list(valid)):
        yield f"{key} = {value!r}: one of {', '.join(valid)}"


def within(key: str, value: float, low: float, high: float) -> Iterator[str]:
    if not low <= value <= high:  # NaN fails as well
        yield f"{key} = {value}: from {low:g} to {high:g}"
