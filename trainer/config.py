"""The settings of a run: frozen dataclasses, one for each table of the TOML file.

`trainer.resolve` makes a config of presets, files and options, `trainer.validate` checks its keys
and types; the values are checked here. All problems are reported together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from retrieval.errors import DmlError
from retrieval.number_format import counted
from trainer import toml

INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "box", "nearest")


class Problem(NamedTuple):
    """Something wrong with settings: their dotted keys, and a line about them."""

    keys: tuple[str, ...]
    text: str
    fix: str = ""
    """What to do about it, if that can be said."""


class BadSettings(DmlError):
    """All problems of a configuration, one per line.

    fix: what to do, unless each problem says it.
    """

    def __init__(self, what: str, problems: list[Problem], fix: str) -> None:
        fixes = [problem.fix for problem in problems]
        why = "\n".join(problem.text for problem in problems)
        super().__init__(what, why, "\n".join(fixes) if all(fixes) else fix)
        self.problems = problems


@dataclass(frozen=True)
class Data:
    """The data set, and how its images are read."""

    dataset: str = "glyphs"
    """Name of the data set; `dmltool list datasets` shows all."""
    root: str = ""
    """Folder or file of the data set; not needed for `glyphs`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the data set's reader, such as `test_fraction` for `folder`."""
    val_fraction: float = 0.1
    """Fraction of the training classes held out to choose the best epoch."""
    val_seed: int = 0
    """Seed that draws the held-out classes. Runs with another `run.seed` share the same classes."""
    min_images: int = 1
    """Leave out training classes with fewer images than this."""
    skip_bad: bool = False
    """Leave out unreadable images; if false, they are an error before training starts."""
    cache: str = "auto"
    """Where to cache resized images: ram, disk or none. auto: ram if images are not files."""
    workers: int = -1
    """Number of processes that load images; -1: chosen from the device and the cache."""

    def problems(self) -> Iterator[Problem]:
        yield from one_of("data.cache", self.cache, ("auto", "none", "ram", "disk"))
        yield from within("data.val_fraction", self.val_fraction, 0, 0.9)
        yield from within("data.min_images", self.min_images, 1, 10**6)
        yield from within("data.workers", self.workers, -1, 1024)


@dataclass(frozen=True)
class Input:
    """What is done to an image before the network sees it."""

    resize: int = 256
    """Length of the short side before cropping, in pixels; 0: images are not resized."""
    keep_ratio: bool = True
    """Keep the aspect ratio; if false, both sides are resized to `resize`."""
    crop: int = 224
    """Side of the square input of the network, in pixels; evaluation uses the centre crop."""
    interpolation: str = "bilinear"
    """Resizing filter: bilinear, bicubic, lanczos or box (all antialiased), or nearest."""
    draft: int = 2
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size, as long as their short side stays at
    least `draft` times `resize`. Larger values are closer to full decoding; 0: always full size."""
    train_crop: str = "resized"
    """Training crop. resized: a random area within `scale` and `ratio`, resized to `crop`; random:
    a square of side `crop` at a random position; center: the centre."""
    scale: tuple[float, float] = (0.16, 1.0)
    """Smallest and largest area of a `resized` crop, as a fraction of the image."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Smallest and largest aspect ratio (width / height) of a `resized` crop."""
    flip: bool = True
    """Mirror training images with probability 0.5."""
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Largest random change of brightness, contrast, saturation and hue."""
    rotate: float = 0.0
    """Largest random rotation in degrees, in either direction."""
    zoom: tuple[float, float] = (1.0, 1.0)
    """Smallest and largest random scaling of the image content."""
    shear: float = 0.0
    """Largest random shear in degrees, in either direction."""
    shift: float = 0.0
    """Largest random shift, as a fraction of the side of the crop."""

    @property
    def short_side(self) -> int | None:
        """What the short side of a JPEG may be reduced to while it is decoded; None: nothing."""
        return self.resize * self.draft or None

    def problems(self) -> Iterator[Problem]:
        yield from one_of("input.interpolation", self.interpolation, INTERPOLATIONS)
        yield from one_of("input.train_crop", self.train_crop, ("resized", "random", "center"))
        yield from within("input.crop", self.crop, 8, 4096)
        yield from within("input.resize", self.resize, 0, 8192)
        yield from within("input.draft", self.draft, 0, 8)
        if 0 < self.resize < self.crop:
            yield Problem(
                ("input.crop", "input.resize"),
                f"input.crop = {self.crop} does not fit into input.resize = {self.resize}",
            )
        for name, low, high in (("scale", 1e-4, 1), ("ratio", 0.01, 100), ("zoom", 0.05, 20)):
            pair = getattr(self, name)
            for value in pair:
                yield from within(f"input.{name}", value, low, high)
            if pair[0] > pair[1]:
                text = f"input.{name} = {list(pair)}: the smaller number comes first"
                yield Problem((f"input.{name}",), text)
        for value, most in zip(self.jitter, (1, 1, 1, 0.5), strict=True):
            yield from within("input.jitter", value, 0, most)
        for name, most in (("rotate", 180), ("shear", 60), ("shift", 0.5)):
            yield from within(f"input.{name}", getattr(self, name), 0, most)


@dataclass(frozen=True)
class Network:
    """The backbone and the embedding on top of it."""

    backbone: str = "smallcnn"
    """Name of the backbone (`dmltool list backbones` shows all), or timm:NAME."""
    weights: str = "none"
    """Initial weights: imagenet, none, or a weights file."""
    dim: int = 0
    """Embedding dimension, by a linear projection; 0: the backbone's own, no projection."""
    batchnorm: bool = False
    """Apply BatchNorm1d without affine parameters to the embedding."""
    freeze_batchnorm: bool = False
    """Keep the running statistics of the backbone's BatchNorm layers fixed."""
    channels: int = 3
    """Input channels: 3 for RGB; 1: the three colours are averaged first."""

    def problems(self) -> Iterator[Problem]:
        yield from within("network.dim", self.dim, 0, 65_536)
        if self.channels not in (1, 3):
            yield Problem(("network.channels",), f"network.channels = {self.channels}: 1 or 3")


@dataclass(frozen=True)
class Loss:
    """The loss, and the losses that are computed beside it."""

    name: str = "ce"
    """Name of the loss (`dmltool list losses` shows all), or pml:NAME."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the loss, such as `temperature` for `group`."""
    length: float = 0.0
    """Scale embeddings to this length before the loss, for l2-normalised training; 0: no scaling.
    A logit then differs from the bias by at most this length times the norm of the weights."""
    miner: str = ""
    """Choose pairs or triplets with a miner of pytorch-metric-learning (`dmltool list miners` shows
    all), or pml:NAME; empty: the loss sees all of a batch."""
    miner_options: dict[str, Any] = field(default_factory=dict)
    """Options of the miner, such as `epsilon` for `multi_similarity`."""
    monitor: tuple[str, ...] = ()
    """Losses to log in addition to the training loss, such as spce and pce."""

    def problems(self) -> Iterator[Problem]:
        yield from within("loss.length", self.length, 0, 1e6)
        if self.miner_options and not self.miner:
            keys = ("loss.miner_options", "loss.miner")
            yield Problem(keys, "loss.miner_options are given, but loss.miner names no miner")


@dataclass(frozen=True)
class Batches:
    """Which images make up a batch."""

    size: int = 128
    """Images per batch, drawn at random; an incomplete last batch of an epoch is left out."""
    classes: int = 0
    """Classes per batch. If set together with `images`, it replaces `size`."""
    images: int = 0
    """Images per class in a batch."""
    repeat: bool = False
    """Repeat images of classes with fewer than `images` images."""
    sampling: str = "images"
    """How often a class is drawn, with `classes` and `images`. images: in proportion to its images;
    classes: all equally often."""
    balance: bool = False
    """Choose `classes` and `images` automatically if they are not set: about `size` images that the
    training classes can fill, with at least 4 images per class if the classes have that many."""

    @property
    def total(self) -> int:
        return self.classes * self.images or self.size

    def problems(self) -> Iterator[Problem]:
        yield from one_of("batches.sampling", self.sampling, ("images", "classes"))
        both = ("batches.classes", "batches.images")
        if bool(self.classes) != bool(self.images):
            yield Problem(both, "batches.classes and batches.images go together")
        for name in ("classes", "images"):
            yield from within(f"batches.{name}", getattr(self, name), 0, 65_536)
        yield from within("batches.size", self.size, 2, 1 << 20)
        if self.classes == self.images == 1:
            text = "batches.classes and batches.images are 1: one image cannot be trained on"
            yield Problem(both, text)


@dataclass(frozen=True)
class Optimizer:
    """The optimiser and its learning rate."""

    name: str = "adam"
    """sgd, adam, radam or adamw; sgd uses Nesterov momentum if `momentum` is above 0."""
    lr: float = 1e-3
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay of parameters with two or more dimensions."""
    decay_all: bool = False
    """Apply weight decay to all parameters, also to biases and BatchNorm."""
    decoupled: bool = False
    """Shrink the weights themselves instead of adding weight decay to the gradient: for radam and
    adam; adamw always does."""
    eps: float = 1e-8
    """Added to the denominator of adam, radam and adamw."""
    loss_lr: float = 1.0
    """Factor on the learning rate of the loss's own parameters (heads, proxies)."""
    clip: float = 0.0
    """Clip the gradient to this norm; 0: no clipping."""

    def problems(self) -> Iterator[Problem]:
        yield from one_of("optimizer.name", self.name, ("sgd", "adam", "radam", "adamw"))
        for name in ("lr", "weight_decay", "loss_lr", "clip", "eps"):
            yield from within(f"optimizer.{name}", getattr(self, name), 0, 1e6)
        if self.decoupled and self.name == "sgd":
            keys = ("optimizer.decoupled", "optimizer.name")
            yield Problem(keys, "optimizer.decoupled = True: sgd has no such weight decay")
        yield from within("optimizer.momentum", self.momentum, 0, 0.9999)


@dataclass(frozen=True)
class Phase:
    """First epochs that train with plain cross-entropy on the head of the loss.

    They count among `schedule.epochs`, and the schedule applies to them.
    """

    epochs: int = 0
    """Number of these epochs; 0: none."""
    batch: int = 0
    """Images per batch, drawn at random; 0: batches as in the other epochs."""
    augment: bool = True
    """Change images at random as in the other epochs; if false, images are those of evaluation."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Settings of `optimizer` that differ, such as {lr = 3e-4}. If there are any, the optimiser is
    a new one after these epochs; otherwise it goes on."""

    def problems(self) -> Iterator[Problem]:
        yield from within("phase.epochs", self.epochs, 0, 10**6)
        if self.batch:
            yield from within("phase.batch", self.batch, 2, 1 << 20)
        for key in self.optimizer.keys() - {each.name for each in fields(Optimizer)}:
            yield Problem((f"phase.optimizer.{key}",), f"there is no key phase.optimizer.{key}")


@dataclass(frozen=True)
class Schedule:
    """How long training takes, and how the learning rate changes."""

    epochs: int = 30
    """Number of epochs."""
    name: str = "cosine"
    """Learning rate: cosine (falls to 0), step (times `factor` at each milestone) or constant."""
    warmup: int = 0
    """Steps over which the learning rate rises from 0; at most a tenth of all steps. With cosine,
    the smaller of warm-up and cosine counts."""
    milestones: tuple[int, ...] = ()
    """Numbers of finished epochs after which `step` lowers the learning rate."""
    factor: float = 0.1
    """Factor on the learning rate at each milestone of `step`."""

    def problems(self) -> Iterator[Problem]:
        yield from one_of("schedule.name", self.name, ("cosine", "step", "constant"))
        yield from within("schedule.epochs", self.epochs, 1, 10**6)
        yield from within("schedule.warmup", self.warmup, 0, 10**9)
        yield from within("schedule.factor", self.factor, 0, 1)
        for epoch in self.milestones:
            yield from within("schedule.milestones", epoch, 1, 10**6)


@dataclass(frozen=True)
class Run:
    """Where a run is computed, and how its best epoch is picked."""

    seed: int = 0
    """Seed of the weights, the order of images, random crops, dropout and anchors."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, ...; auto: CUDA, else MPS, else the CPU."""
    threads: int = 0
    """CPU threads of torch; 0: a short trial chooses, and a resumed run keeps that number."""
    precision: str = "auto"
    """Precision of the network: fp32, bf16 or fp16. auto: bf16 on GPUs that support it, else fp32.
    The loss is always computed in float32."""
    channels_last: bool = True
    """Use torch's channels-last memory layout."""
    compile: bool = False
    """Compile the network with torch.compile."""
    deterministic: bool = False
    """Make runs repeat exactly: refuse GPU operations that are not deterministic; on a CPU use a
    fixed number of threads instead of the one that a trial finds fastest."""
    select: str = "val"
    """How to choose the best epoch: val (held-out training classes, so that it trains on 90 % of
    them), test (test set: use this to compare with the papers) or last (keep the last epoch)."""
    recall_at: tuple[int, ...] = ()
    """Values of K for Recall@K on the test set after training; empty: those that papers give for
    the data set, else 1, 2, 4, 8."""
    train_recall: int = 0
    """Number of training images, drawn as whole classes, for Recall@1 after each epoch; 0: none.
    Compared with the scores of held-out classes it shows overfitting."""
    log: tuple[str, ...] = ()
    """Trackers that also get the metrics: tensorboard, mlflow, wandb, or package.module:NAME."""

    def problems(self) -> Iterator[Problem]:
        yield from one_of("run.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        yield from one_of("run.select", self.select, ("val", "test", "last"))
        yield from within("run.threads", self.threads, 0, 10**6)
        yield from within("run.seed", self.seed, 0, 2**63 - 1)
        yield from within("run.train_recall", self.train_recall, 0, 10**9)
        for k in self.recall_at:
            yield from within("run.recall_at", k, 1, 10**9)


@dataclass(frozen=True)
class Config:
    """All settings of a run; a wrong one is an error when it is made."""

    data: Data = field(default_factory=Data)
    input: Input = field(default_factory=Input)
    network: Network = field(default_factory=Network)
    loss: Loss = field(default_factory=Loss)
    batches: Batches = field(default_factory=Batches)
    optimizer: Optimizer = field(default_factory=Optimizer)
    phase: Phase = field(default_factory=Phase)
    schedule: Schedule = field(default_factory=Schedule)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        found = [each for part in fields(self) for each in getattr(self, part.name).problems()]
        if self.phase.epochs > self.schedule.epochs:
            text = (
                f"phase.epochs = {self.phase.epochs} is more than "
                f"schedule.epochs = {self.schedule.epochs}"
            )
            fix = f"Use --set phase.epochs=0, or --epochs {self.phase.epochs + 1} or more."
            found.append(Problem(("phase.epochs", "schedule.epochs"), text, fix))
        if not any(key.startswith("phase.optimizer") for each in found for key in each.keys):
            own = replace(self.optimizer, **self.phase.optimizer).problems()
            known = {each.text for each in found}
            found += [
                Problem((f"phase.{keys[0]}",), f"phase.{text}")
                for keys, text, _ in own
                if text not in known
            ]
        if found:
            raise BadSettings(
                f"The configuration has {counted(len(found), 'problem')}.",
                found,
                "Change them with --set table.key=value, or in the file.",
            )

    def optimizer_in(self, epoch: int) -> Optimizer:
        """The optimiser's settings in an epoch, counted from 0."""
        own = self.phase.optimizer if epoch < self.phase.epochs else {}
        return replace(self.optimizer, **own)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the tables as plain dicts, with lists instead of tuples, as in TOML."""
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
            lines = [f"{key} = {toml.render(value)}" for key, value in table.items()]
            tables.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(tables) + "\n"


def one_of(key: str, value: object, valid: Iterable[str]) -> Iterator[Problem]:
    """A problem if the value is not one of the valid ones."""
    if value not in (valid := list(valid)):
        yield Problem((key,), f"{key} = {value!r}: one of {', '.join(valid)}")


def within(key: str, value: float, low: float, high: float) -> Iterator[Problem]:
    """A problem if the value is not from low to high."""
    if not low <= value <= high:  # NaN fails as well
        yield Problem((key,), f"{key} = {value}: from {low:g} to {high:g}")
