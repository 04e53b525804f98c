"""Collect what a report shows of a run, and find the images of an embedding file. No torch."""

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.distances import DISTANCES
from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError, install
from retrieval.loading.folders import best_run, made_with_another
from retrieval.reporting.thumbs import Pictures
from retrieval.reporting.view import Run
from retrieval.run_files import BEST, CONFIG, METRICS
from trainer import toml
from trainer.data import datasets
from trainer.data.datasets.records import Drawing, FileReader
from trainer.results import EpochRecord
from trainer.run.metrics_log import read_metrics

LARGEST_NUMBER = 1e300
SIDE = 64  # of the thumbnails that the images become
SAMPLE = 20  # images of each split that are looked for
NAME_IT = "Name the folder that the paths begin at: --images ROOT"


def run_view(folder: Path) -> Run:
    """Curves and settings of a run folder."""
    text = _settings_text(folder)
    records = read_metrics(folder)
    if not records:
        raise DmlError(
            f"{folder} has no epochs to show.",
            f"{folder / METRICS} is missing or empty.",
            "Name a folder made by `dmltool train`, or leave out --run.",
        )
    scores = _curves(records, "scores")
    epochs = [_number(record.get("epoch")) for record in records]
    return {
        "name": folder.resolve().name,
        "epochs": [n if epoch is None else epoch for n, epoch in enumerate(epochs, 1)],
        "lines": {
            "loss": [_number(record.get("loss")) for record in records],
            "parts": _curves(records, "parts"),
            "monitor": _curves(records, "monitor"),
            **{f"recall_{d}": scores.get(d, [None] * len(records)) for d in DISTANCES},
        },
        "scores_of": next((r.get("scores_of") for r in records if r.get("scores")), None),
        "settings": text,
    }


def note_on_run(data: Embeddings, folder: Path | None) -> str:
    """Say if the embeddings were made with another checkpoint than that of the run beside them."""
    if folder is None or folder.resolve() == Path(data.source).resolve().parent:
        return ""  # reading the file has noted it
    network = folder / BEST
    if not network.is_file() or not made_with_another(data, network):
        return ""
    return f"the embeddings were made with another checkpoint than {network}"


def _curves(records: list[EpochRecord], key: str) -> dict[str, list[float | None]]:
    tables = [_dict(record.get(key)) for record in records]
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [_number(table.get(name)) for table in tables] for name in names}


def _number(value: object) -> float | None:
    """Return a number that a chart can show, else None; JSON integers may be of any length."""
    if not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        return None
    return value


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _settings_text(folder: Path) -> str:
    try:
        with (folder / CONFIG).open(encoding="utf-8") as file:
            return file.read(toml.LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        run = shlex.quote(str(best_run(folder) or "runs/NAME"))
        raise DmlError(
            f"{folder} is not a run folder.",
            f"{folder / CONFIG} cannot be read: {getattr(error, 'strerror', None) or error}.",
            f"Name a folder made by `dmltool train`: --run {run}",
        ) from error


@dataclass(frozen=True)
class Folder:
    """Images under a root folder, and none elsewhere, whatever the paths in a file say."""

    root: Path

    def __call__(self, path: str) -> np.ndarray:
        from trainer.data.images import read_rgb

        root = self.root.resolve()
        try:
            place = (root / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, a loop
            raise DmlError(
                f"{path} cannot be read as an image.", f"{error}.", "Check the paths of the file."
            ) from error
        if not place.is_relative_to(root):
            raise DmlError(
                f"{path} is not shown.",
                f"It leads out of {self.root}.",
                "Name the folder that holds all images: --images ROOT",
            )
        return read_rgb(place, SIDE)


def pictures_of(
    data: Embeddings, images: Path | None, run: Path | None
) -> tuple[Pictures | None, str]:
    """Find the images of an embedding file: an object that reads them, and a note if there is none.

    The images are in the folder `images` if it is given, else where the file says, else where the
    run has them.
    """
    if images is not None:
        _check_folder(data, images)
        return Folder(images), ""
    if run is None and all(split.paths is None for split in data.splits.values()):
        return None, ""
    name, recorded = data.attrs.get("dataset"), _recorded(data)
    entry = datasets.DATASETS.entries.get(str(name))
    read, note = None, ""
    if recorded.get("files"):
        read, note = _recorded_folder(data, recorded)
    elif recorded or (entry and not entry.needs_root):
        options = _dict(recorded.get("options")) | dict(entry.display_options if entry else {})
        root = next((str(place) for place in _places(data, recorded) if place.exists()), None)
        read, note = _pictures(str(name), root, options)
    if run is None or (read is not None and recorded):
        unknown = f"images are not shown: the file does not say where they are. {NAME_IT}"
        return read, note or ("" if read else unknown)
    table = _table(run)
    if name is not None and name != table["dataset"]:
        return None, f"images are not shown: {run} is of {table['dataset']}, the file of {name}"
    return _pictures(**table)


def _recorded(data: Embeddings) -> dict[str, Any]:
    """What the file says of its images, see docs/files.md; the file may be anyone's."""
    try:
        return _dict(json.loads(str(data.attrs.get("images", "{}"))))
    except (ValueError, RecursionError):
        return {}


def _places(data: Embeddings, recorded: dict[str, Any]) -> list[Path]:
    """Where the root may be: as it was, beside the file as it was, or as it was given."""
    absolute, relative, given = (recorded.get(k) for k in ("absolute", "relative", "root"))
    beside = Path(data.source).parent
    named = [absolute, relative and beside / str(relative), given]
    return [Path(str(place)) for place in named if place]


def _recorded_folder(data: Embeddings, recorded: dict[str, Any]) -> tuple[Pictures | None, str]:
    """The first place that has one of the first images of the file."""
    columns = [split.paths for split in data.splits.values() if split.paths is not None]
    some = [str(path) for column in columns for path in column[:SAMPLE]]
    places = _places(data, recorded)
    for place in places:
        with suppress(OSError, ValueError):
            if any((place / path).is_file() for path in some):
                return Folder(place), ""
    first = places[0] if places else "their folder"
    return None, f"images are not shown: they are no longer in {first}. {NAME_IT}"


def _check_folder(data: Embeddings, images: Path) -> None:
    if not images.is_dir():
        raise DmlError(
            f"There is no folder {images}.",
            "The paths in the file are looked up there.",
            "Name the folder that they begin at: --images ROOT",
        )
    if all(split.paths is None for split in data.splits.values()):
        raise DmlError(
            f"{data.source} holds no paths.",
            f"So nothing says which of the images in {images} is which item.",
            "Leave out --images, or write the paths into the file (docs/files.md).",
        )


def _table(run: Path) -> dict[str, Any]:
    try:
        table = _dict(toml.parse(_settings_text(run)).get("data"))
    except ValueError as error:
        raise DmlError(
            f"{run / CONFIG} is not TOML.", f"{error}.", "Correct the file, or name another --run."
        ) from error
    return {
        "dataset": str(table.get("dataset")),
        "root": table.get("root") or None,
        "options": _dict(table.get("options")),
    }


def _pictures(
    dataset: str, root: str | None, options: dict[str, Any]
) -> tuple[Pictures | None, str]:
    try:
        data = datasets.load(dataset, root, **options)
    except DmlError as error:
        return None, f"images are not shown: {error.what} {NAME_IT}"
    except ModuleNotFoundError as error:
        return None, f"images are not shown: that needs {error.name}. {install('cpu')}"
    if isinstance(data.reader, FileReader):
        return Folder(Path(data.reader.root)), ""
    reader, known = data.reader, frozenset(data.paths).__contains__
    if isinstance(reader, Drawing):  # in the size of a thumbnail: the same shapes, sharper
        reader, known = reader.at_size(SIDE), reader.draws

    def read(path: str) -> np.ndarray:
        if not known(path):
            raise DmlError(
                f"{path} is not an image of the data set {dataset}.",
                "The embedding file names this data set, with these options.",
                "Embed the data set again, or name the folder of the images: --images ROOT",
            )
        return reader(path, SIDE)

    return read, ""
