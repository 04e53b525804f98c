"""Name files that are not read, with one line that converts each kind."""

from __future__ import annotations

import json
import os
import re
import shlex
import zipfile
from pathlib import Path

from retrieval.errors import DmlError

URL = re.compile(r"(https?|ftp|s3|gs|hf):/+(.+)")
RUN_FILES = ("config.toml", "best.pt", "last.pt", "metrics.jsonl")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SHARDS = (".npy", ".npz", ".parquet", ".arrow", ".feather", ".csv", ".jsonl", ".h5", ".pt",
          ".safetensors")  # fmt: skip
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
        return _zarr(path) if _is_zarr(path) else _folder(path)
    return _file(path) if path.exists() else None


# What a file begins with: its format, what to call it, and its usual suffix.
SIGNATURES = {
    b"\x89HDF\r\n\x1a\n": ("hdf5", "an HDF5 file", ".h5"),
    b"\x93NUMPY": ("npy", "a NumPy array", ".npy"),
    b"PAR1": ("arrow", "a Parquet file", ".parquet"),
    b"ARROW1": ("arrow", "an Arrow file", ".arrow"),
    b"\x1f\x8b\x08": ("gzip", "compressed by gzip", ".gz"),
}
BINARY = ("vecs", "ivecs", "safetensors")  # these begin with a number, which may be any


def misnamed(path: Path, format: str) -> DmlError | None:
    """The error for a file whose first bytes are those of another format than its suffix says."""
    with path.open("rb") as file:
        start = file.read(16)
    for mark, (found, kind, suffix) in SIGNATURES.items():
        if start.startswith(mark) and found != format and format not in BINARY:
            new = path.with_name(path.name + ".gz") if found == "gzip" else path.with_suffix(suffix)
            return DmlError(
                f"{path} is {kind}, not a {path.suffix} file.",
                "Its first bytes are not those that its suffix promises.",
                f"Rename it: mv {shlex.quote(str(path))} {shlex.quote(str(new))}",
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
    shown = f"It holds {', '.join(names[:5])}{', ...' * (len(names) > 5)}."
    return DmlError(
        f"{path} is a zip archive.",
        shown if names else "It cannot be listed, or is empty.",
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
    suffix, text = path.suffix.lower(), str(path)

    def out(new: str) -> str:
        return quoted(path.with_suffix(new))

    if suffix in (".xlsx", ".xls", ".xlsm", ".ods"):
        code = f"pandas.read_excel({quoted(text)}).to_csv({out('.csv')}, index=False)"
        return DmlError(
            f"{path} is a spreadsheet.",
            "Spreadsheets are not read.",
            f"Save it as CSV there, or: {python_line('pandas', code)}",
        )
    if suffix in (".pkl", ".pickle", ".joblib") or _starts(path, b"\x80\x02", b"\x80\x04"):
        joblib = suffix == ".joblib"
        module, how = ("joblib", "load") if joblib else ("pandas", "read_pickle")
        code = (
            f"x = {module}.{how}({quoted(text)}); "
            f'x.to_parquet({out(".parquet")}) if hasattr(x, "to_parquet") else '
            f"numpy.savez({out('.npz')}, **x) if isinstance(x, dict) else "
            f"numpy.save({out('.npy')}, x)"
        )
        return DmlError(
            f"{path} is a Python pickle.",
            "Unpickling can run any code, so it is never done here.",
            f"If you trust the file: {python_line(f'numpy, {module}', code)}",
        )
    if suffix == ".mat":
        return _mat(path)
    if suffix == ".zarr":
        return _zarr(path)
    if suffix == ".onnx":
        return DmlError(
            f"{path} is an ONNX model, not embeddings.",
            "Embeddings come from running it on images.",
            f"Run it: dmltool embed {shlex.quote(text)} IMAGES --out embeddings.h5",
        )
    if suffix == ".zip" and _starts(path, b"PK"):
        return _zip(path)
    if suffix in (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".zst") and not _starts(
        path, b"PK"
    ):
        return DmlError(
            f"{path} is an archive or is compressed.",
            "Of compressed files those of gzip are read (.npy.gz, .csv.gz, .jsonl.gz).",
            "Unpack it first, and give the file inside.",
        )
    return None


def _mat(path: Path) -> DmlError:
    out = quoted(path.with_suffix(".npz"))
    if _starts(path, b"MATLAB 7.3"):
        kind = "a MATLAB file of version 7.3, which is HDF5 with its arrays transposed"
        code = (
            f"m = h5py.File({quoted(path)}); "
            f"numpy.savez({out}, **{{k: v[()].T.squeeze() for k, v in "
            "m.items() if isinstance(v, h5py.Dataset)})"
        )
        line = python_line("h5py, numpy", code)
    else:
        kind = "a MATLAB file"
        code = (
            f"m = scipy.io.loadmat({quoted(path)}); "
            f"numpy.savez({out}, **{{k: v.squeeze() for k, v in "
            'm.items() if k[0] != "_"})'
        )
        line = python_line("numpy, scipy.io", code)
    return DmlError(f"{path} is {kind}.", "MATLAB files are not read.", f"Convert it: {line}")


def _is_zarr(path: Path) -> bool:
    marks = (".zarray", ".zgroup", "zarr.json")
    return path.suffix.lower() == ".zarr" or any((path / mark).exists() for mark in marks)


def _zarr(path: Path) -> DmlError:
    stem = str(path.with_suffix(""))
    code = (
        f'z = zarr.open({quoted(path)}, mode="r"); numpy.save({quoted(stem + ".npy")}, z[:]) if '
        f'hasattr(z, "shape") else numpy.savez({quoted(stem + ".npz")}, '
        "**{k: v[:] for k, v in z.arrays()})"
    )
    return DmlError(
        f"{path} is a Zarr store.",
        "Zarr stores are not read.",
        f"Convert it: {python_line('numpy, zarr', code)}",
    )


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
            f"It holds {', '.join(runs[:5])}{', ...' * (len(runs) > 5)}. One run is expected.",
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
        f"It holds {', '.join(names[:5])}{', ...' * (len(names) > 5)}."
        if names
        else "It is empty.",
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
        for suffix in (*SHARDS, *IMAGES)
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


def _starts(path: Path, *marks: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(16).startswith(marks)
