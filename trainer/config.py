"""The settings of a run: frozen dataclasses, one for each table of the TOML file.

`trainer.resolve` makes a config of presets, files and options, `trainer.validate` checks its keys
and types; the values are checked here. All problems are reported together.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from retrieval.number_format import counted
from retrieval.settings import BadSettings, Checked, Fault, one_of, within
from trainer import toml

INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "box", "nearest")


class Table(Checked):
    """A table of settings, which is called as its class."""

    def problems(self, prefix: str = "") -> Iterator[Fault]:
        return super().problems(prefix or f"{type(self).__name__.lower()}.")


@dataclass(frozen=True)
class Data(Table):
    """The data set, and how its images are read."""

    dataset: str = "glyphs"
    """Name of the data set; `dmltool list datasets` shows all."""
    root: str = ""
    """Folder or file of the data set; not needed for `glyphs`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the data set's reader, such as `test_fraction` for `folder`."""
    val_fraction: float = within(0, 0.9, default=0.1)
    """Fraction of the training classes held out to choose the best epoch."""
    val_seed: int = 0
    """Seed that draws the held-out classes; `run.seed` does not change them."""
    min_images: int = within(1, 10**6, default=1)
    """Leave out training classes with fewer images than this."""
    skip_bad: bool = False
    """Leave out unreadable images; if false, they are an error before training starts."""
    cache: str = one_of("auto", "none", "ram", "disk", default="auto")
    """Where to cache resized images: ram, disk or none. auto: ram if images are not files."""
    workers: int = within(-1, 1024, default=-1)
    """Number of processes that load images; -1: depends on the device and the cache."""


@dataclass(frozen=True)
class Input(Table):
    """What is done to an image before the network sees it."""

    resize: int = within(0, 8192, default=256)
    """Length of the short side before cropping, in pixels; 0: images are not resized."""
    keep_ratio: bool = True
    """Keep the aspect ratio; if false, both sides are resized to `resize`."""
    crop: int = within(8, 4096, default=224)
    """Side of the square input of the network, in pixels; evaluation uses the centre crop."""
    interpolation: str = one_of(*INTERPOLATIONS, default="bilinear")
    """Resizing filter: bilinear, bicubic, lanczos or box (all antialiased), or nearest."""
    draft: int = within(0, 8, default=2)
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size, as long as their short side stays at
    least `draft` times `resize`. Larger values are closer to full decoding; 0: always full size."""
    train_crop: str = one_of("resized", "random", "center", default="resized")
    """Training crop. resized: a random area within `scale` and `ratio`, resized to `crop`; random:
    a square of side `crop` at a random position; center: the centre."""
    scale: tuple[float, float] = within(1e-4, 1, default=(0.16, 1.0))
    """Smallest and largest area of a `resized` crop, as a fraction of the image."""
    ratio: tuple[float, float] = within(0.01, 100, default=(0.75, 4 / 3))
    """Smallest and largest aspect ratio (width / height) of a `resized` crop."""
    flip: bool = True
    """Mirror training images with probability 0.5."""
    jitter: tuple[float, float, float, float] = within(0, 1, default=(0.0, 0.0, 0.0, 0.0))
    """Largest random change of brightness, contrast, saturation and hue."""
    rotate: float = within(0, 180, default=0.0)
    """Largest random rotation in degrees, in either direction."""
    zoom: tuple[float, float] = within(0.05, 20, default=(1.0, 1.0))
    """Smallest and largest random scaling of the image content."""
    shear: float = within(0, 60, default=0.0)
    """Largest random shear in degrees, in either direction."""
    shift: float = within(0, 0.5, default=0.0)
    """Largest random shift, as a fraction of the side of the crop."""

    @property
    def short_side(self) -> int | None:
        """What the short side of a JPEG may be reduced to while it is decoded; None: nothing."""
        return self.resize * self.draft or None

    def conflicts(self) -> Iterator[Fault]:
        if 0 < self.resize < self.crop:
            yield Fault(
                ("input.crop", "input.resize"),
                f"input.crop = {self.crop} does not fit into input.resize = {self.resize}.",
            )
        for name in ("scale", "ratio", "zoom"):
            low, high = getattr(self, name)
            if low > high:
                text = f"input.{name} = [{low}, {high}] does not begin with the smaller number."
                yield Fault((f"input.{name}",), text)
        if self.jitter[3] > 0.5:
            text = f"input.jitter = {list(self.jitter)} changes the hue by more than 0.5."
            yield Fault(("input.jitter",), text)


@dataclass(frozen=True)
class Network(Table):
    """The backbone and the embedding on top of it."""

    backbone: str = "smallcnn"
    """Name of the backbone (`dmltool list backbones` shows all), or timm:NAME."""
    weights: str = "none"
    """Initial weights: imagenet, none, or a weights file."""
    dim: int = within(0, 65_536, default=0)
    """Embedding dimension, made by a linear projection; 0: that of the backbone, no projection."""
    batchnorm: bool = False
    """Apply BatchNorm1d without affine parameters to the embedding."""
    freeze_batchnorm: bool = False
    """Keep the running statistics of the backbone's BatchNorm layers fixed."""
    channels: int = one_of(1, 3, default=3)
    """Input channels: 3 for RGB; 1: the mean of the three colours."""


@dataclass(frozen=True)
class Loss(Table):
    """The loss, and the losses that are computed beside it."""

    name: str = "ce"
    """Name of the loss (`dmltool list losses` shows all), or pml:NAME."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the loss, such as `temperature` for `group`."""
    length: float = within(0, 1e6, default=0.0)
    """Scale embeddings to this length before the loss, for l2-normalised training; 0: no scaling.
    A logit then differs from the bias by at most this length times the norm of the weights."""
    miner: str = ""
    """Choose pairs or triplets with a miner of pytorch-metric-learning (`dmltool list miners` shows
    all), or pml:NAME; empty: the loss sees the whole batch."""
    miner_options: dict[str, Any] = field(default_factory=dict)
    """Options of the miner, such as `epsilon` for `multi_similarity`."""
    monitor: tuple[str, ...] = ()
    """Losses to log in addition to the training loss, such as spce and pce."""

    def conflicts(self) -> Iterator[Fault]:
        if self.miner_options and not self.miner:
            keys = ("loss.miner_options", "loss.miner")
            yield Fault(keys, "loss.miner_options are given, but loss.miner names no miner.")


@dataclass(frozen=True)
class Batches(Table):
    """Which images make up a batch."""

    size: int = within(2, 1 << 20, default=128)
    """Images per batch, drawn at random; an incomplete last batch of an epoch is left out."""
    classes: int = within(0, 65_536, default=0)
    """Classes per batch. If set together with `images`, it replaces `size`."""
    images: int = within(0, 65_536, default=0)
    """Images per class in a batch."""
    repeat: bool = False
    """Repeat images of classes with fewer than `images` images."""
    sampling: str = one_of("images", "classes", default="images")
    """How often a class is drawn if `classes` and `images` are set. images: in proportion to its
    number of images; classes: all classes equally often."""
    balance: bool = False
    """Choose `classes` and `images` automatically if they are not set, so that a batch has about
    `size` images and, if the classes are large enough, at least 4 images per class."""

    @property
    def total(self) -> int:
        return self.classes * self.images or self.size

    def conflicts(self) -> Iterator[Fault]:
        both = ("batches.classes", "batches.images")
        if bool(self.classes) != bool(self.images):
            yield Fault(both, "batches.classes and batches.images are not both given.")
        if self.classes == self.images == 1:
            text = "batches.classes and batches.images are 1: one image cannot be trained on."
            yield Fault(both, text)


@dataclass(frozen=True)
class Optimizer(Table):
    """The optimiser and its learning rate."""

    name: str = one_of("sgd", "adam", "radam", "adamw", default="adam")
    """sgd, adam, radam or adamw; sgd uses Nesterov momentum if `momentum` is above 0."""
    lr: float = within(0, 1e6, default=1e-3)
    """Learning rate."""
    momentum: float = within(0, 0.9999, default=0.0)
    """Momentum of sgd."""
    weight_decay: float = within(0, 1e6, default=0.0)
    """Weight decay of parameters with two or more dimensions."""
    decay_all: bool = False
    """Apply weight decay to all parameters, also to biases and BatchNorm."""
    decoupled: bool = False
    """Decoupled weight decay for adam and radam: shrink the weights directly instead of adding the
    decay to the gradient. adamw always does this."""
    eps: float = within(0, 1e6, default=1e-8)
    """Number added to the denominator of adam, radam and adamw."""
    loss_lr: float = within(0, 1e6, default=1.0)
    """Factor on the learning rate of the loss's own parameters (heads, proxies)."""
    clip: float = within(0, 1e6, default=0.0)
    """Clip the gradient to this norm; 0: no clipping."""

    def conflicts(self) -> Iterator[Fault]:
        if self.decoupled and self.name == "sgd":
            keys = ("optimizer.decoupled", "optimizer.name")
            yield Fault(keys, "optimizer.decoupled = True: sgd has no such weight decay.")


@dataclass(frozen=True)
class Phase(Table):
    """First epochs that train with plain cross-entropy on the head of the loss.

    They count among `schedule.epochs`, and the schedule applies to them.
    """

    epochs: int = within(0, 10**6, default=0)
    """Number of first epochs, which train with plain cross-entropy on the loss's head; 0: none."""
    batch: int = within(0, 1 << 20, default=0)
    """Images per batch in these epochs, drawn at random; 0: batches as in the other epochs."""
    augment: bool = True
    """Augment images as in the other epochs; if false, prepare them as in evaluation."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Settings of `optimizer` that differ in these epochs, such as {lr = 3e-4}. If there are any, a
    new optimiser starts after these epochs; otherwise the same one continues."""

    def conflicts(self) -> Iterator[Fault]:
        if self.batch == 1:
            yield Fault(("phase.batch",), "phase.batch = 1 is not 0, or 2 or more.")


@dataclass(frozen=True)
class Schedule(Table):
    """How long training takes, and how the learning rate changes."""

    epochs: int = within(1, 10**6, default=30)
    """Number of epochs."""
    name: str = one_of("cosine", "step", "constant", default="cosine")
    """Learning rate: cosine (falls to 0), step (times `factor` at each milestone) or constant."""
    warmup: int = within(0, 10**9, default=0)
    """Steps over which the learning rate rises from 0; at most a tenth of all steps. With cosine,
    the learning rate is the smaller of warm-up and cosine."""
    milestones: tuple[int, ...] = within(1, 10**6, default=())
    """Epochs after which `step` lowers the learning rate, counted from 1."""
    factor: float = within(0, 1, default=0.1)
    """Factor on the learning rate at each milestone of `step`."""


@dataclass(frozen=True)
class Run(Table):
    """Where a run is computed, and how its best epoch is picked."""

    seed: int = within(0, 2**63 - 1, default=0)
    """Seed of the weights, the order of images, random crops, dropout and anchors."""
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, mps, ...; auto: CUDA, else MPS, else the CPU."""
    threads: int = within(0, 10**6, default=0)
    """CPU threads of torch; 0: a short trial chooses, and a resumed run keeps the number."""
    precision: str = one_of("auto", "fp32", "bf16", "fp16", default="auto")
    """Precision of the network: fp32, bf16 or fp16. auto: bf16 on GPUs that support it, else fp32.
    The loss is always computed in float32."""
    channels_last: bool = True
    """Use torch's channels-last memory layout."""
    compile: bool = False
    """Compile the network with torch.compile."""
    deterministic: bool = False
    """Make repeated runs give identical results: refuse GPU operations that are not deterministic,
    and on a CPU use a fixed number of threads instead of the fastest one in a trial."""
    select: str = one_of("val", "test", "last", default="val")
    """How to choose the best epoch. val: on held-out training classes (`data.val_fraction`); test:
    on the test set, as the papers do, and train on all training classes; last: the last epoch."""
    recall_at: tuple[int, ...] = within(1, 10**9, default=())
    """Values of K for Recall@K on the test set after training; empty: those that papers use for
    the data set, else 1, 2, 4, 8."""
    train_recall: int = within(0, 10**9, default=0)
    """Number of training images, in whole classes, on which Recall@1 is computed after each epoch;
    0: none. Compare it with the scores of held-out classes to see overfitting."""
    log: tuple[str, ...] = ()
    """Trackers that receive the metrics: tensorboard, mlflow, wandb, or package.module:NAME."""


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
                f"schedule.epochs = {self.schedule.epochs}."
            )
            fix = f"Use --set phase.epochs=0, or --epochs {self.phase.epochs + 1} or more."
            found.append(Fault(("phase.epochs", "schedule.epochs"), text, fix))
        found += [
            Fault((f"phase.{each.keys[0]}",), f"phase.{each.text}")
            for each in self.optimizer_in(-1).problems()
            if each not in found
        ]
        if found:
            raise BadSettings(
                f"The configuration has {counted(len(found), 'problem')}.",
                found,
                "Change them with --set table.key=value, or in the file.",
            )

    def optimizer_in(self, epoch: int) -> Optimizer:
        """The optimiser's settings in an epoch, counted from 0; -1: those of the first phase."""
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

    def dotted(self) -> dict[str, Any]:
        """Return all settings by their dotted keys."""
        tables = self.to_dict().items()
        return {f"{name}.{key}": value for name, table in tables for key, value in table.items()}

    def to_toml(self) -> str:
        return toml.render_tables(self.to_dict())
