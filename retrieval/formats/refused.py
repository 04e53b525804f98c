"""Name files that are not read, with one line that converts each kind."""

from __future__ import annotations

import json
import os
import re
import shlex
import zipfile
from pathlib import Path
from string import Template

from retrieval.errors import DmlError

URL = re.compile(r"(https?|ftp|s3|gs|hf):/+(.+)")
RUN_FILES = ("config.toml", "best.pt", "last.pt", "metrics.jsonl")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SHARDS = "npy npz parquet arrow feather csv jsonl h5 pt safetensors"
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".zst")
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
    ".zarr": (
        "a Zarr store",
        "Zarr stores are not read",
        "numpy, zarr",
        'z = zarr.open($path, mode="r"); numpy.save($npy, z[:]) if hasattr(z, "shape") '
        "else numpy.savez($npz, **{k: v[:] for k, v in z.arrays()})",
    ),
}
SPLITS = 20  # entries of a folder that are looked at one level down


def python_line(modules: str, code: str) -> str:
    """A command for the shell."""
    return "python -c " + shlex.quote(f"import {modules}; {code}")


def quoted(text: str | Path) -> str:
    """A text in Python, in double quotes: the shell wants the single ones."""
    return json.dumps(str(text), ensure_ascii=False)


def explain(path: Path) -> DmlError | None:
    """What a file or name is that no reader takes, and the line that converts it."""
    found = URL.match(str(path))
    if found and not path.exists():
        return _url(found[1], found[2])
    if path.is_dir():
        return _convertible(path, ".zarr") if _is_zarr(path) else _folder(path)
    return _file(path) if path.exists() else None


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
        f"It holds {_some(names)}." if names else "It cannot be listed, or is empty.",
        f"Unpack it and give the file inside: unzip {shlex.quote(str(path))}",
    )


def _url(scheme: str, rest: str) -> DmlError:
    name = shlex.quote(Path(rest).name)
    address = shlex.quote(f"{scheme}://{rest}")
    fetch = {"s3": f"aws s3 cp {address} .", "gs": f"gcloud storage cp {address} ."}
    if scheme == "hf":
        kind, *parts = rest.split("/")
        kinds = {"datasets": "dataset", "spaces": "space"}
        parts = parts if kind in kinds else [kind, *parts]
        repository, inside = "/".join(parts[:2]), "/".join(parts[2:])
        fetch["hf"] = " ".join(
            ["hf download", shlex.quote(repository), shlex.quote(inside)]
            + ([f"--repo-type {kinds[kind]}"] if kind in kinds else [])
            + ["--local-dir ."]
        )
    return DmlError(
        f"{scheme}://{rest} is an address, not a file.",
        "Nothing is downloaded by dmltool.",
        f"Fetch it first: {fetch.get(scheme, f'curl -L -o {name} {address}')}",
    )


def _file(path: Path) -> DmlError | None:
    suffix, here = path.suffix.lower(), shlex.quote(str(path))
    if suffix == ".mat" and _starts(path, b"MATLAB 7.3"):
        return _convertible(path, ".mat 7.3")
    if suffix in CONVERSIONS:
        return _convertible(path, suffix)
    if _starts(path, b"\x80\x02", b"\x80\x04"):
        return _convertible(path, ".pkl")
    if suffix == ".onnx":
        return DmlError(
            f"{path} is an ONNX model, not embeddings.",
            "Embeddings come from running it on images.",
            f"Run it: dmltool embed {here} IMAGES --out embeddings.h5",
        )
    if suffix == ".zip" and _starts(path, b"PK"):
        return _zip(path)
    if suffix in ARCHIVES and not _starts(path, b"PK"):
        return DmlError(
            f"{path} is an archive or is compressed.",
            "Of compressed files those of gzip are read (.npy.gz, .csv.gz, .jsonl.gz).",
            "Unpack it first, and give the file inside.",
        )
    return None


def _convertible(path: Path, kind: str) -> DmlError:
    what, why, modules, code = CONVERSIONS[kind]
    names = {new: quoted(path.with_suffix(f".{new}")) for new in ("npy", "npz", "csv", "parquet")}
    line = python_line(modules, Template(code).substitute(names, path=quoted(path)))
    return DmlError(f"{path} is {what}.", f"{why}.", f"If you trust it, convert it: {line}")


def _is_zarr(path: Path) -> bool:
    marks = (".zarray", ".zgroup", "zarr.json")
    return path.suffix.lower() == ".zarr" or any((path / mark).exists() for mark in marks)


def _folder(path: Path) -> DmlError:
    names = sorted(os.listdir(path))
    here = shlex.quote(str(path))
    if any(name in names for name in RUN_FILES):
        return DmlError(
            f"{path} is a run without embeddings.",
            "Its embeddings.h5 is written by export.",
            f"Export it: dmltool export {here}",
        )
    if runs := [name for name in names[:SPLITS] if (path / name / "config.toml").is_file()]:
        done = [name for name in runs if (path / name / "embeddings.h5").is_file()]
        run = shlex.quote(str(path / (done or runs)[0]))
        return DmlError(
            f"{path} is a folder of runs.",
            f"It holds {_some(runs)}. One run is expected.",
            f"Choose one: dmltool eval {run}" if done else f"Export one: dmltool export {run}",
        )
    if "dataset_dict.json" in names or {"dataset_info.json", "state.json"} & set(names):
        return _hugging_face(path, names)
    if "config.json" in names and any(
        name.endswith((".safetensors", ".bin", ".onnx")) for name in names
    ):
        return DmlError(
            f"{path} is a Hugging Face model, not embeddings.",
            "Embeddings come from running it on images.",
            f"Convert and run it: optimum-cli export onnx --model {here} onnx && "
            "dmltool embed onnx/model.onnx IMAGES --out embeddings.h5",
        )
    return _shards(path, names) or DmlError(
        f"{path} is a folder.",
        f"It holds {_some(names)}." if names else "It is empty.",
        "Give one embedding file.",
    )


def _hugging_face(path: Path, names: list[str]) -> DmlError:
    arrow = [name for name in names if name.endswith(".arrow")]
    what = f"{path} is a data set of Hugging Face's datasets."
    if len(arrow) == 1:
        return DmlError(
            what,
            "Its rows are in one Arrow file.",
            f"Give that file: dmltool eval {shlex.quote(str(path / arrow[0]))}",
        )
    out = quoted(f"{path.name}.parquet")
    if arrow:
        code = f"datasets.load_from_disk({quoted(path)}).to_parquet({out})"
        why = f"Its rows are in {len(arrow)} Arrow files, which are not read together."
    else:
        split = next((name for name in ("test", "validation", "train") if name in names), "test")
        code = f"datasets.load_from_disk({quoted(path)})[{quoted(split)}].to_parquet({out})"
        why = "It holds several splits, each in a folder of its own."
    return DmlError(what, why, f"Write one file: {python_line('datasets', code)}")


def _shards(path: Path, names: list[str]) -> DmlError | None:
    """Several files of one format, or images."""
    counts = {
        suffix: sum(name.lower().endswith(suffix) for name in names)
        for suffix in (*(f".{name}" for name in SHARDS.split()), *IMAGES)
    }
    suffix = max(counts, key=counts.__getitem__)
    folders = [entry for entry in names[:SPLITS] if (path / entry).is_dir()]
    if suffix in IMAGES or (not any(counts.values()) and _has_images(path, folders)):
        return DmlError(
            f"{path} is a folder of images, not embeddings.",
            "Embeddings come from running a model on them.",
            f"Run one: dmltool embed model.onnx {shlex.quote(str(path))} --out embeddings.h5",
        )
    if counts[suffix] == 1:
        name = next(name for name in names if name.lower().endswith(suffix))
        return DmlError(
            f"{path} is a folder.",
            f"It holds one embedding file, {name}.",
            f"Give that file: dmltool eval {shlex.quote(str(path / name))}",
        )
    if not counts[suffix]:
        return None
    pattern, out = quoted(path / f"*{suffix}"), quoted(f"{path.name}{suffix}")
    every = f"sorted(glob.glob({pattern}))"
    lines = {
        ".npy": (
            "glob, numpy",
            f"numpy.save({out}, numpy.concatenate([*map(numpy.load, {every})]))",
        ),
        ".parquet": ("pyarrow.parquet as p", f"p.write_table(p.read_table({quoted(path)}), {out})"),
        ".csv": (
            "glob, pandas",
            f"pandas.concat(map(pandas.read_csv, {every})).to_csv({out}, index=False)",
        ),
    }
    fix = "Join them into one file, or give one of them."
    if suffix in lines:
        fix = f"Join them in the order of their names: {python_line(*lines[suffix])}"
    elif suffix == ".jsonl":
        fix = f"Join them: cat {shlex.quote(str(path))}/*.jsonl > {shlex.quote(path.name)}.jsonl"
    return DmlError(
        f"{path} is a folder of {counts[suffix]:,} {suffix} files.",
        "Files in several parts are not read together.",
        fix,
    )


def _has_images(path: Path, folders: list[str]) -> bool:
    return any(
        entry.lower().endswith(IMAGES) for name in folders for entry in os.listdir(path / name)
    )


def _some(names: list[str]) -> str:
    return ", ".join([*names[:5], "..."] if len(names) > 5 else names)


def _starts(path: Path, *marks: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(16).startswith(marks)
