"""Find the embedding files in a folder by the names in it: a run, shards, sets of other tools."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

from retrieval.embeddings import SPELLINGS, Embeddings, note
from retrieval.errors import DmlError, command, damaged, pattern
from retrieval.files import sha256
from retrieval.formats import FORMATS, is_compressed, store_format
from retrieval.formats.refused import RUN_FILES, explain_folder, unreadable
from retrieval.formats.shard_sets import PART
from retrieval.resources import StageProgress
from retrieval.run_files import BEST, CONFIG, EMBEDDINGS, SWEEP

LISTINGS = ("state.json", "dataset_dict.json")
"""Of Hugging Face's datasets: they are read to find out which files belong to a set."""
LISTING_BYTES = 1 << 24  # that are read of one; it lists some hundred files


def note_outdated(data: Embeddings, progress: StageProgress | None = None) -> None:
    """Say of the embeddings of a run that the network was trained on since their export."""
    file = Path(data.source)
    network = file.with_name(BEST)
    if file.name != EMBEDDINGS:
        return
    try:
        newer = network.stat().st_mtime > file.stat().st_mtime
    except OSError:  # it is not there, or cannot be read
        return
    if newer and made_with_another(data, network, progress):
        again = command("export", network.parent, "--force")
        note(f"{file} was exported before {network} was written; export it again: {again}")


def made_with_another(
    data: Embeddings, network: Path, progress: StageProgress | None = None
) -> bool:
    """Whether embeddings record that they were made with other checkpoints than this one.

    Of a checkpoint that cannot be read, that is not known.
    """
    recorded = data.attrs.get("checkpoint_sha256")
    try:
        return bool(recorded) and sha256(network, progress=progress) not in str(recorded).split(",")
    except OSError:
        return False


def choose(
    path: Path, names: Collection[str], labels: bool = False
) -> tuple[tuple[Path, ...], Path | None]:
    """The embedding files, in natural order, and a file of labels that belongs to them.

    names: what is in the folder, which need not be there itself, unless it has LISTINGS.
    labels: whether files of labels are wanted; without others, they may be texts.
    """
    if EMBEDDINGS in names:
        return (path / EMBEDDINGS,), None
    for stem in ("vectors", "tensors"):  # of TensorBoard's projector
        pair = [_perhaps_compressed(f"{name}.tsv", names) for name in (stem, "metadata")]
        if all(pair):
            return (path / pair[0],), path / pair[1]
    if "dataset_dict.json" in names:
        return _splits_of_hugging_face(path), None
    if "state.json" in names:
        return _hugging_face(path), None
    if SWEEP in names and (run := best_run(path)):
        done = (run / EMBEDDINGS).is_file()
        raise DmlError(
            f"{path} is a folder of several runs.",
            f"The first run of its best setting is {run}.",
            f"Name its embeddings: {run / EMBEDDINGS}"
            if done
            else f"Export it: {command('export', run)}",
        )
    if any(name in names for name in RUN_FILES):
        return _shards_of_run(path, names), None
    files = _embedding_files(names)
    if labels and not files:
        files = _files_of(names, {s for format in FORMATS for s in format.suffixes})
    shards = [name for name in files if not (path / name).is_dir() or store_format(path / name)]
    for name in _embedding_files(name.removesuffix(".partial") for name in names):
        if name not in names:  # its rows would be missing
            raise unreadable(path / f"{name}.partial")
    if error := explain_folder(path, names, shards):
        raise error
    formats = sorted({_inner_suffix(name) for name in shards})
    if len(formats) > 1:
        raise DmlError(
            f"{path} holds files of several formats: {', '.join(formats)}.",
            "The files of a set have one format.",
            f"Choose some by a pattern: {pattern(path, formats[0])}",
        )
    return in_natural_order(path / name for name in shards), None


def _shards_of_run(path: Path, names: Collection[str]) -> tuple[Path, ...]:
    """The shards that `export --shard` has written into the folder of a run."""
    if shards := [name for name in _embedding_files(names) if is_part(name)]:
        return in_natural_order(path / name for name in shards)
    begun = {name.removesuffix(".partial") for name in names if name.endswith(".partial")}
    for name in sorted(name for name in begun if name == EMBEDDINGS or is_part(name)):
        part = PART.fullmatch(name)
        more = ["--shard", f"{part[2]}/{part[3]}"] if part else []
        again = command("export", path, *more, "--resume")
        raise DmlError(
            f"{path} is a run whose export has not finished.",
            f"{path / name}.partial is half-written: rows may be missing.",
            f"Continue the export: {again}",
        )
    error = explain_folder(path, names, [])
    assert error is not None, "it is a run"
    raise error


def is_part(name: str) -> bool:
    """Whether this is the name of a shard of the embeddings of a run."""
    found = PART.fullmatch(name)
    return found is not None and found[1] + found[4] == EMBEDDINGS


def best_run(folder: Path) -> Path | None:
    """The first run of the best setting of a sweep, or of several seeds; None if that is unknown.

    It is looked for in the folder, which may have been moved.
    """
    try:
        run = Path(_json(folder / SWEEP)["rows"][0]["runs"][0]["run"])
    except (DmlError, LookupError, TypeError):
        return None
    places = (folder / run.parent.name / run.name, folder / run.name)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def no_match(pattern: str, fix: str) -> DmlError:
    return DmlError(
        f"{pattern} matches no file.",
        "A pattern stands for the files whose names it fits: * for any text, ? for one character, "
        "[0-9] for one of several, [[] for a bracket itself.",
        fix,
    )


def in_natural_order(files: Iterable[Path]) -> tuple[Path, ...]:
    """Sorted, part-2 before part-10."""
    return tuple(sorted(files, key=_natural))


def _natural(path: Path) -> tuple[list[str | int], str]:
    pieces = re.split(r"([0-9]+)", str(path))
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)], str(path)


def _embedding_files(names: Iterable[str]) -> list[str]:
    """The names, of those in a folder, that have the suffix of an embedding format."""
    return _files_of(
        names, {s for format in FORMATS if not format.labels_only for s in format.suffixes}
    )


def _files_of(names: Iterable[str], suffixes: Collection[str]) -> list[str]:
    """The names that are not hidden and have one of these suffixes."""
    shown = [name for name in names if not name.startswith((".", "_"))]
    return [name for name in shown if os.path.splitext(name)[1].lower() in suffixes]


def _perhaps_compressed(name: str, names: Collection[str]) -> str:
    """The name among `names`, maybe with the suffix of a compressed file; empty if none is."""
    packed = (f"{name}{s}" for format in FORMATS if format.compressed for s in format.suffixes)
    return next((each for each in (name, *packed) if each in names), "")


def _inner_suffix(name: str) -> str:
    """`.npy` of both x.npy and x.npy.gz."""
    suffixes = Path(name).suffixes
    inside = is_compressed(name) and len(suffixes) > 1
    return suffixes[-2 if inside else -1].lower()


def _hugging_face(path: Path) -> tuple[Path, ...]:
    """The Arrow files of a folder that `save_to_disk` of Hugging Face's datasets wrote, in order.

    The rows of a filtered data set, which old versions keep in a file of their own, are refused.
    """
    state = _json(path / "state.json")
    listed = state.get("_data_files")
    listed = listed if isinstance(listed, list) else []
    names = [entry.get("filename") for entry in listed if isinstance(entry, dict)]
    good = [name for name in names if isinstance(name, str) and name == os.path.basename(name)]
    if not good or len(good) != len(listed):
        raise damaged(f"{path / 'state.json'} does not list the files of a data set.")
    if state.get("_indices_data_files"):
        raise DmlError(
            f"{path} is a selection of rows of a data set.",
            "It was saved by an old version of datasets, which keeps the selection in a file.",
            "Save it again: dataset.flatten_indices().save_to_disk(FOLDER)",
        )
    return tuple(path / name for name in good)


def _splits_of_hugging_face(path: Path) -> tuple[Path, ...]:
    listed = _json(path / "dataset_dict.json").get("splits")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    known = [name for name in names if name in SPELLINGS and (path / name).is_dir()]
    if lost := [name for name in names if name in SPELLINGS and not known]:
        raise damaged(f"{path} lists the split {lost[0]}, whose folder is not there.")
    if not known:
        raise DmlError(
            f"{path} is a data set with the splits {', '.join(names) or '(none)'}.",
            f"Splits that are read: {', '.join(sorted(SPELLINGS))}.",
            f"Give one of its folders: {shlex.quote(str(path / names[0]))}"
            if names
            else "Save it again: dataset.save_to_disk(FOLDER)",
        )
    return tuple(file for name in known for file in _hugging_face(path / name))


def _json(path: Path) -> dict:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LISTING_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(f"{path} cannot be read.", f"{error}.") from error
    if not isinstance(found, dict):
        raise damaged(f"{path} holds no JSON object.")
    return found
