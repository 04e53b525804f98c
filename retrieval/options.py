"""Types of command-line values, and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from retrieval.console import print_json, to_json
from retrieval.kmeans import STARTS
from retrieval.number_format import parse_size

if TYPE_CHECKING:
    from retrieval.evaluation import Settings


class Numbers(click.ParamType):
    """Numbers separated by commas, such as 1,2,4,8, or by another sign."""

    def __init__(
        self,
        name: str,
        expected: str,
        kind: type = int,
        count: int | None = None,
        low: float = float("-inf"),
        high: float = float("inf"),
        separator: str = ",",
    ) -> None:
        self.name, self.expected, self.separator = name, expected, separator
        self.kind, self.count, self.low, self.high = kind, count, low, high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self.kind(part) for part in value.split(self.separator))
        except ValueError:
            numbers = ()
        right = numbers if self.count is None else len(numbers) == self.count
        if not right or not all(self.low <= number <= self.high for number in numbers):
            self.fail(f"{value!r} is not {self.expected}.", param, ctx)
        return numbers


class Size(click.ParamType):
    """A number of bytes, such as 2GB or 512MB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Device(click.ParamType):
    """A device that counts ranks: auto, cpu, cuda or cuda:1."""

    name = "DEVICE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from retrieval.ranking.backends.choice import DEVICES, PATTERN

        if not PATTERN.fullmatch(value):
            self.fail(f"{value!r} is not {DEVICES}.", param, ctx)
        return value


def options(*decorators: Callable) -> Callable:
    """Join several click options into one decorator."""

    def apply(command: Callable) -> Callable:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def help_with(**texts: str) -> Callable[[Callable], Callable]:
    """Put texts into the docstring of a command, which is its help, in place of their names."""

    def fill(command: Callable) -> Callable:
        for name, text in texts.items():
            command.__doc__ = (command.__doc__ or "").replace(name, text)
        return command

    return fill


PATH = click.Path(readable=False)
"""A path, pattern or address. The shell completes paths; commands check what they name."""

labels_option = click.option(
    "--labels",
    type=PATH,
    metavar="FILE",
    help="File with one label per row: .npy, .txt, .csv, FILE::key, ...",
)
gallery_options = options(
    click.option(
        "--gallery",
        type=PATH,
        metavar="FILE",
        help="Embedding file of the gallery; FILE holds the queries.",
    ),
    labels_option,
    click.option(
        "--gallery-labels",
        type=PATH,
        metavar="FILE",
        help="File with one label per row of the gallery.",
    ),
)
nonfinite_option = click.option(
    "--drop-nonfinite", is_flag=True, help="Leave out rows with NaN or infinity instead of failing."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
force_option = click.option("--force", is_flag=True, help="Overwrite existing output files.")
output_options = options(
    json_option,
    click.option("--out", type=PATH, metavar="FILE", help="Also write the result as JSON to FILE."),
    force_option,
)


class FieldChoice(click.Choice):
    """The values that a field of settings takes, which `one_of` has made.

    The settings are named like `trainer.config:Run` and imported when the values are needed: the
    help of all commands does without.
    """

    def __init__(self, settings: str, field: str) -> None:
        self.settings, self.field, self.case_sensitive = settings, field, True

    def __getattr__(self, name: str) -> Any:
        if name != "choices":
            raise AttributeError(name)
        from dataclasses import fields

        [found] = [each for each in fields(resolve_name(self.settings)) if each.name == self.field]
        self.choices = tuple(found.metadata["choices"])
        return self.choices


def choice_option(name: str, choices: Iterable[str], help: str) -> Callable:
    """An option that takes one of several words, by default the first."""
    words = list(choices)
    kind = click.Choice(words)
    return click.option(name, type=kind, default=words[0], show_default=True, help=help)


def whole_option(name: str, help: str, low: int = 1, **more: Any) -> Callable:
    """An option that takes a whole number from `low` on; a default is shown."""
    shown = "default" in more
    return click.option(
        name, type=click.IntRange(low), metavar="N", show_default=shown, help=help, **more
    )


def device_option(task: str = "Device that counts ranks") -> Callable:
    """The option --device; its help begins with the task of the device."""
    return click.option(
        "--device",
        type=Device(),
        default="auto",
        show_default=True,
        help=f"{task}: cpu, cuda (all GPUs) or cuda:1; auto: GPUs if they work and the problem is "
        "large.",
    )


scoring_options = options(
    click.option(
        "--distance",
        type=click.Choice(["l2", "cos", "both"]),
        default="both",
        show_default=True,
        help="l2: Euclidean distance; cos: cosine similarity.",
    ),
    click.option(
        "--recall-at",
        type=Numbers("K,K,...", "a list of whole numbers from 1 such as 1,2,4,8", low=1),
        callback=lambda _ctx, _param, ks: tuple(dict.fromkeys(ks or ())),
        help="Values of K for Recall@K.  [default: those that papers use for the data set, else "
        "1,2,4,8]",
    ),
    click.option(
        "--map/--no-map",
        "map_at_r",
        default=True,
        show_default=True,
        help="Compute MAP@R and R-precision.",
    ),
    whole_option(
        "--seeds",
        "Number of seeds of k-means, for the mean and deviation of NMI and AMI.",
        default=3,
    ),
    choice_option(
        "--kmeans-init",
        STARTS,
        "Initial centroids of k-means: greedy k-means++ or random items.",
    ),
    whole_option("--queries", "Evaluate only N random queries; the gallery stays complete."),
    whole_option(
        "--seed", "Seed of the random choice of queries and of the bootstrap.", 0, default=0
    ),
    click.option(
        "--memory",
        type=Size(),
        default="2GB",
        show_default=True,
        help="Limit of working memory, in addition to the embeddings.",
    ),
    whole_option("--threads", "Number of threads.  [default: one per processor]"),
    device_option(),
)


def scoring_settings(distance: str, **given: Any) -> Settings:
    """Return the settings that `scoring_options` describe."""
    from retrieval.distances import DISTANCES
    from retrieval.evaluation import Settings

    return Settings(distances=DISTANCES if distance == "both" else (distance,), **given)


class Output(NamedTuple):
    """Where a result goes, according to `output_options`."""

    as_json: bool
    target: Path | None
    force: bool

    per_class: Path | None = None

    @classmethod
    def checked(
        cls,
        as_json: bool,
        out: str | None,
        force: bool,
        inputs: list[Path],
        per_class: str | None = None,
    ) -> Output:
        """Refuse a target that exists or is one of the inputs before the work begins."""
        from retrieval.files import CSV, JSON, check_target

        target, classes = (
            None if name is None else check_target(name, kind, force, inputs)
            for name, kind in ((out, JSON), (per_class, CSV))
        )
        return cls(as_json, target, force, classes)

    def write(self, result: Mapping[str, Any]) -> None:
        """Write the result to the target, and print it if JSON is wanted."""
        if self.target:
            from retrieval.files import write_text

            write_text(self.target, to_json(result), self.force)
        if self.as_json:
            print_json(result)
