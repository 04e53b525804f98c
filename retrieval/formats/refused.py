"""Recognise files of unsupported formats, and show a command that converts them."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import zipfile
from collections.abc import Iterable
from pathlib import Path
from string import Template

from retrieval.errors import DmlError, command, listed
from retrieval.files import names_in, nearest_folder
from retrieval.registry import nearest
from retrieval.run_files import BEST, CONFIG, EMBEDDINGS, LAST, METRICS, MODEL

RUN_FILES = (CONFIG, BEST, LAST, METRICS)
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz")
SPREADSHEET = (
    "a spreadsheet",
    "Spreadsheets are not read",
    "pandas",
    "pandas.read_excel($path).to_csv($csv, index=False)",
)
SAVE = (
    'x.to_parquet($parquet) if hasattr(x, "to_parquet") else '
    "numpy.savez($npz, **x) if isinstance(x, dict) else numpy.save($npy, x)"
)
PICKLE = ("a Python pickle", "Unpickling can run any code, so it is never done here")
# By suffix: what the file is, why it is not read, and the modules and code that convert it.
CONVERSIONS = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), SPREADSHEET),
    ".joblib": (*PICKLE, "numpy, joblib", f"x = joblib.load($path); {SAVE}"),
    ".pkl": (*PICKLE, "numpy, pandas", f"x = pandas.read_pickle($path); {SAVE}"),
    ".pickle": (*PICKLE, "numpy, pandas", f"x = pandas.read_pickle($path); {SAVE}"),
    ".mat": (
        "a MATLAB file",
        "MATLAB files are not read",
        "numpy, scipy.io",
        "m = scipy.io.loadmat($path); "
        'numpy.savez($npz, **{k: v.squeeze() for k, v in m.items() if k[0] != "_"})',
    ),
    ".mat 7.3": (
        "a MATLAB file of version 7.3",
        "It is HDF5 with its arrays transposed",
        "h5py, numpy",
        "m = h5py.File($path); numpy.savez($npz, "
        "**{k: v[()].T.squeeze() for k, v in m.items() if isinstance(v, h5py.Dataset)})",
    ),
}
SPLITS = 20  # entries of a folder that are looked at one level down


def python_line(modules: str, code: str) -> str:
    """A command for the shell."""
    return "python -c " + shlex.quote(f"import {modules}; {code}")


def quoted(text: str | Path) -> str:
    """A text in Python, in double quotes: the shell wants the single ones."""
    return json.dumps(str(text), ensure_ascii=False)


def unreadable(path: Path) -> DmlError:
    """The error about a name that is not a regular file, or an empty file."""
    again = "Run the command that writes it again; export and embed continue with --resume."
    if path.suffix == ".partial":
        unfinished = "Its writer has not finished; rows may be missing."
        return DmlError(f"{path} is half-written.", unfinished, again)
    if path.is_file():
        return DmlError(f"{path} is empty.", "It has no bytes at all.", "Write it again.")
    if path.is_dir() and (error := explain_folder(path, os.listdir(path), [])):
        return error
    if path.exists():
        why = "Pipes and devices are not read."
        return DmlError(f"{path} is not a regular file.", why, "Save the data as a file first.")
    if path.with_name(path.name + ".partial").exists():
        return DmlError(
            f"{path} does not exist.",
            f"Only {path.name}.partial is there: its writer has not finished.",
            again,
        )
    if path.is_symlink():
        return DmlError(
            f"{path} is a link that leads to no file.",
            f"It leads to {os.readlink(path)}.",
            "Restore that file, or give another one.",
        )
    return missing(path)


def missing(path: Path) -> DmlError:
    """The error about a file that does not exist."""
    if path.name in (MODEL, EMBEDDINGS) and (path.parent / CONFIG).is_file():
        return DmlError(
            f"{path} does not exist.",
            f"The {path.name} of a run is written by export.",
            f"Export the run: {command('export', path.parent)}",
        )
    why = "There is no such file."
    if not path.parent.is_dir():
        why = f"The folder {path.parent} does not exist either."
        if path.parent.exists():
            why = f"{path.parent} is not a folder."
    folder = nearest_folder(path)
    name, *rest = path.relative_to(folder).parts
    found = difflib.get_close_matches(name, names_in(folder), 3)
    # Of a folder that is misspelled only those names that lead to a file.
    near = [there for n in found if (there := folder.joinpath(n, *rest)).exists()]
    fix = f"Look there: ls {shlex.quote(str(folder))}"
    if near:
        fix = f"Did you mean {' or '.join(map(str, near))}?"
    return DmlError(f"{path} does not exist.", why, fix)


def unknown(path: Path, known: list[str]) -> DmlError:
    """The error about a file of unknown format; known: the suffixes that are read."""
    near = nearest(path.suffix.lower(), known)
    return DmlError(
        f"{path} has the suffix {path.suffix.lower() or '(none)'}, and its first bytes are not "
        "familiar either.",
        f"These suffixes are read: {' '.join(known)}.",
        f"Did you mean {near}?" if near else "Convert the file to one of these formats.",
    )


def labels_only(path: Path) -> DmlError:
    """The error about a file of labels that is given as embeddings."""
    return json_records(path) or DmlError(
        f"{path} holds labels only.",
        "A file of embeddings comes first.",
        f"Give both: dmltool eval embeddings.npy --labels {shlex.quote(str(path))}",
    )


def explain(path: Path) -> DmlError | None:
    """The error about a file of an unsupported format, with a command that converts it."""
    if _starts(path, b"version https://git-lfs"):
        return DmlError(
            f"{path} is a pointer of Git LFS.",
            "It stands for a file that has not been downloaded.",
            f"Download it: git lfs pull --include {shlex.quote(path.name)}",
        )
    if _starts(path, b"<!doctype html", b"<html"):
        return DmlError(
            f"{path} is a web page.",
            "A server may have sent a page about an error or a login instead of the file.",
            "Open it in a browser to see what it says, and download the file again.",
        )
    suffix = path.suffix.lower()
    if suffix == ".mat" and _starts(path, b"matlab 7.3"):
        return _convertible(path, ".mat 7.3")
    if suffix in CONVERSIONS:
        return _convertible(path, suffix)
    if _starts(path, b"\x80\x02", b"\x80\x04"):
        return _convertible(path, ".pkl")
    if suffix == ".onnx":
        return DmlError(
            f"{path} is an ONNX model, not embeddings.",
            "Embeddings come from running it on images.",
            f"Run it: {command('embed', path, 'IMAGES', '--out', 'embeddings.h5')}",
        )
    if suffix == ".zip" and _starts(path, b"pk"):
        return _zip(path)
    if suffix in ARCHIVES and not _starts(path, b"pk"):
        return DmlError(
            f"{path} is an archive or is compressed.",
            "Of compressed files those of gzip and zstd are read (.npy.gz, .csv.zst, .jsonl.gz).",
            "Unpack it first, and give the file inside.",
        )
    return None


def json_records(path: Path) -> DmlError | None:
    """The error for a list of objects in a .json file, with the line that converts it."""
    with path.open("rb") as file:
        start = file.read(256).removeprefix(b"\xef\xbb\xbf").split()
    if path.suffix.lower() != ".json" or not b"".join(start).startswith(b"[{"):
        return None
    out = shlex.quote(str(path.with_suffix(".jsonl")))
    code = f"[print(json.dumps(row)) for row in json.load(open({quoted(path)}))]"
    return DmlError(
        f"{path} is a list of JSON objects.",
        "Such records are read with one object on each line, as .jsonl.",
        f"Convert it: {python_line('json', code)} > {out}",
    )


def _zip(path: Path) -> DmlError | None:
    """The error for a zip archive that is neither of NumPy nor of torch."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        names = []
    if any(name.endswith((".npy", "/data.pkl")) for name in names):
        return None
    return DmlError(
        f"{path} is a zip archive.",
        f"It holds {listed(names)}." if names else "It cannot be listed, or is empty.",
        f"Unpack it and give the file inside: unzip {shlex.quote(str(path))}",
    )


def _convertible(path: Path, kind: str) -> DmlError:
    what, why, modules, code = CONVERSIONS[kind]
    names = {new: quoted(path.with_suffix(f".{new}")) for new in ("npy", "npz", "csv", "parquet")}
    line = python_line(modules, Template(code).substitute(names, path=quoted(path)))
    return DmlError(f"{path} is {what}.", f"{why}.", f"If you trust it, convert it: {line}")


def explain_folder(path: Path, names: Iterable[str], shards: list[str]) -> DmlError | None:
    """The error about a folder without embedding files, by the names in it.

    shards: those of them that could be embeddings.
    """
    names = sorted(names)
    here = shlex.quote(str(path))
    if any(name in names for name in RUN_FILES):
        return DmlError(
            f"{path} is a run without embeddings.",
            f"Its {EMBEDDINGS} is written by export.",
            f"Export it: {command('export', path)}",
        )
    if runs := [name for name in names[:SPLITS] if (path / name / CONFIG).is_file()]:
        done = [name for name in runs if (path / name / EMBEDDINGS).is_file()]
        run = path / (done or runs)[0]
        return DmlError(
            f"{path} is a folder of runs.",
            f"It holds {listed(runs)}. One run is expected.",
            f"Choose one: {shlex.quote(str(run))}"
            if done
            else f"Export one: {command('export', run)}",
        )
    if "config.json" in names and any(
        name.endswith((".safetensors", ".bin", ".onnx")) for name in names
    ):
        return DmlError(
            f"{path} is a Hugging Face model, not embeddings.",
            "Embeddings come from running it on images.",
            f"Convert and run it: optimum-cli export onnx --model {here} onnx && "
            "dmltool embed onnx/model.onnx IMAGES --out embeddings.h5",
        )
    images = sum(name.lower().endswith(IMAGES) for name in names)
    folders = [name for name in names[:SPLITS] if (path / name).is_dir()]
    inside = (name for folder in folders for name in os.listdir(path / folder))
    if images > len(shards) or (not shards and any(n.lower().endswith(IMAGES) for n in inside)):
        return DmlError(
            f"{path} is a folder of images, not embeddings.",
            "Embeddings come from running a model on them.",
            f"Run one: {command('embed', 'model.onnx', path, '--out', 'embeddings.h5')}",
        )
    if shards:
        return None
    return DmlError(
        f"{path} is a folder without embedding files.",
        f"It holds {listed(names)}." if names else "It is empty.",
        "Give an embedding file, a folder of such files, or a pattern: 'shards/*.npy'",
    )


def _starts(path: Path, *marks: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(256).lstrip().lower().startswith(marks)
