"""Sound files of every format: what the mutations start from. Their bytes are always the same."""

from __future__ import annotations

import gzip
import json
import os
import struct
from pathlib import Path

import numpy as np

N, D, CLASSES = 36, 6, 6


def vectors(dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(5)
    found = rng.standard_normal((CLASSES, D))[labels()] + 0.6 * rng.standard_normal((N, D))
    return (40 * found if np.dtype(dtype).kind in "iu" else found).astype(dtype)


def labels() -> np.ndarray:
    return np.arange(N) % CLASSES


def names() -> np.ndarray:
    return np.array([f"class {n}" for n in labels()])


def paths() -> np.ndarray:
    return np.array([f"{n % CLASSES}/{n}.png" for n in range(N)])


def embedding_files(folder: Path) -> dict[str, bytes]:
    """By name; formats are told by the suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in (_hdf5, _numpy, _text, _arrow, _safetensors, _vecs, _faiss, _packed):
        make(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _hdf5(folder: Path) -> None:
    import h5py

    from retrieval.embeddings import Split
    from retrieval.formats.hdf5 import writing as hdf5

    fixed = {"created": "2020-01-01T00:00:00+00:00", "dmltool": "0", "preprocessing": {"crop": 16}}
    own = {"test": Split(vectors(), labels(), paths())}
    hdf5.write(folder / "own.h5", own, np.unique(names()), fixed)
    sides = {"query": Split(vectors()[:9], names()[:9]), "gallery": Split(vectors(), names())}
    hdf5.write(folder / "sides.h5", sides, attrs=fixed)
    with h5py.File(folder / "chunks.hdf5", "w") as file:
        file.create_dataset("embeddings", data=vectors(), chunks=(8, 4), compression="gzip")
        file.create_dataset("labels", data=labels(), chunks=(8,), shuffle=True, fletcher32=True)
    with h5py.File(folder / "filters.h5", "w") as file:
        file.create_dataset("x", data=vectors("int8"), chunks=(9, D), compression="lzf")
        file.create_dataset("y", data=labels().astype("u1"), chunks=(12,), fletcher32=True)
    with h5py.File(folder / "latest.h5", "w", libver="latest") as file:
        file.create_dataset("embeddings", data=vectors(), chunks=(N, D), maxshape=(None, D))
        file.create_dataset("labels", data=labels(), maxshape=(None,))
        file.attrs["distance"] = "euclidean"
    with h5py.File(folder / "texts.he5", "w") as file:
        file["embeddings"] = vectors("float16")
        file.create_dataset("labels", data=names().tolist(), dtype=h5py.string_dtype())
        file["paths"] = paths().astype("S")
    with h5py.File(folder / "virtual.h5", "w", libver="latest") as file:
        file["part"] = vectors()
        parts = [(".", "part", row, row + 12) for row in range(0, N, 12)]
        virtual(file, "embeddings", "f4", parts)
        file["labels"] = labels()


def virtual(file, name: str, dtype: str, parts: list[tuple], fill: float | None = None) -> None:
    """parts: file, data set, first and last row. By hand: h5py would put the time into it."""
    import h5py

    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_obj_track_times(False)
    if fill is not None:
        how.set_fill_value(np.array(fill, dtype))
    for place, source, a, b in parts:
        rows = h5py.h5s.create_simple((N, D))
        rows.select_hyperslab((a, 0), (b - a, D))
        how.set_virtual(rows, place.encode(), source.encode(), rows)
    space, kind = h5py.h5s.create_simple((N, D)), h5py.h5t.py_create(np.dtype(dtype))
    h5py.h5d.create(file.id, name.encode(), kind, space, how)


def _numpy(folder: Path) -> None:
    np.save(folder / "plain.npy", vectors())
    np.save(folder / "fortran.npy", np.asfortranarray(vectors("float64")))
    np.save(folder / "bytes.npy", vectors("uint8"))
    np.savez(folder / "plain.npz", embeddings=vectors(), labels=labels())
    np.savez_compressed(folder / "texts.npz", x=vectors("float16"), y=names(), paths=paths())


def _text(folder: Path) -> None:
    rows = [[f"{x:.4g}" for x in row] for row in vectors()]
    head = ",".join(["label", *(f"d{n}" for n in range(D))])
    lines = [",".join([name, *row]) for name, row in zip(names(), rows, strict=True)]
    (folder / "wide.csv").write_text("\n".join([head, *lines]) + "\n")
    lines = ["\t".join([*row, str(n)]) for n, row in zip(labels(), rows, strict=True)]
    (folder / "bare.tsv").write_text("\n".join(lines) + "\n")
    columns = zip(labels(), rows, paths(), strict=True)
    lines = [f'"[{", ".join(row)}]",{n},"{path}"' for n, row, path in columns]
    (folder / "lists.csv").write_text("\n".join(["embedding,label,path", *lines]) + "\n")
    records = [
        {"embedding": [float(x) for x in row], "label": n, "id": i}
        for i, (row, n) in enumerate(zip(rows, names().tolist(), strict=True))
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "records.jsonl").write_text(text)
    (folder / "records.ndjson").write_text(text.replace(", ", ","))
    (folder / "labels.txt").write_text("\n".join(names()) + "\n")
    (folder / "numbers.txt").write_text("\n".join(map(str, labels())) + "\n")
    (folder / "labels.json").write_text(json.dumps(names().tolist()))


def _arrow(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import feather, ipc, parquet

    lists = pa.array(vectors().tolist(), pa.list_(pa.float32()))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(vectors().ravel()), D)
    named = pa.array(names().tolist()).dictionary_encode()
    table = pa.table({"embedding": lists, "label": names().tolist()})
    other = pa.table({"embedding": fixed, "label": named, "path": paths().tolist()})
    wide = pa.table({f"d{n}": vectors()[:, n] for n in range(D)} | {"label": labels()})
    parquet.write_table(table, folder / "lists.parquet")
    parquet.write_table(wide, folder / "wide.pq", compression="zstd", row_group_size=10)
    parquet.write_table(wide, folder / "plain.parquet", compression="none", use_dictionary=False)
    feather.write_feather(other, folder / "fixed.feather", compression="zstd")
    feather.write_feather(table, folder / "lz4.feather", compression="lz4")
    with ipc.new_file(folder / "file.arrow", other.schema) as out:
        out.write_table(other)
    with ipc.new_stream(folder / "stream.arrow", wide.schema) as out:
        out.write_table(wide)


def _safetensors(folder: Path) -> None:
    body = vectors().tobytes() + labels().tobytes()
    size = vectors().nbytes
    head = {
        "__metadata__": {"format": "pt"},
        "embeddings": {"dtype": "F32", "shape": [N, D], "data_offsets": [0, size]},
        "labels": {"dtype": "I64", "shape": [N], "data_offsets": [size, len(body)]},
    }
    raw = json.dumps(head).encode()
    (folder / "plain.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def _vecs(folder: Path) -> None:
    def vecs(array: np.ndarray) -> bytes:
        return b"".join(struct.pack("<i", array.shape[1]) + row.tobytes() for row in array)

    (folder / "plain.fvecs").write_bytes(vecs(vectors()))
    (folder / "plain.bvecs").write_bytes(vecs(vectors("uint8")))
    (folder / "labels.ivecs").write_bytes(vecs(labels().astype("<i4")[:, None]))


def _faiss(folder: Path) -> None:
    """As faiss.write_index writes them; importing FAISS would start threads."""
    head = struct.pack("<iqqq?i", D, N, 1 << 20, 1 << 20, True, 1)
    body = struct.pack("<Q", N * D) + vectors().tobytes()
    flat = b"IxF2" + head + body
    ids = struct.pack("<Q", N) + np.arange(N).tobytes()
    (folder / "flat.faiss").write_bytes(flat)
    (folder / "ids.index").write_bytes(b"IxMp" + head + flat + ids)


def _packed(folder: Path) -> None:
    import pyarrow as pa

    for name in ("plain.npy", "wide.csv", "bare.tsv", "records.jsonl", "labels.txt"):
        data = (folder / name).read_bytes()
        (folder / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
        (folder / f"{name}.zst").write_bytes(pa.compress(data, codec="zstd", asbytes=True))


# What needs torch


def torch_files(folder: Path) -> dict[str, bytes]:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    x, y = torch.from_numpy(vectors()), torch.from_numpy(labels())
    torch.save({"embeddings": x, "labels": y}, folder / "plain.pt")
    nested = {"test": {"X": x.bfloat16().T.contiguous().T, "y": names().tolist()}}
    torch.save(nested, folder / "nested.pth")
    torch.save((x.half(), y.int()), folder / "old.pt", _use_new_zipfile_serialization=False)
    return _contents(folder)


def run_folder(folder: Path) -> Path:
    """A finished training of one epoch on a few small images, made as a user makes it."""
    from trainer.config import Batches, Config, Data, Input, Network, Run, Schedule
    from trainer.run.train import train

    folder.mkdir(parents=True, exist_ok=True)
    draw_images(folder / "images")
    config = Config(
        data=Data("folder", "images", val_fraction=0.2, workers=0, cache="none"),
        input=Input(resize=0, crop=16, train_crop="center", flip=False),
        network=Network("smallcnn", dim=4),
        batches=Batches(size=8),
        schedule=Schedule(epochs=1),
        run=Run(device="cpu", recall_at=(1,)),
    )
    before = Path.cwd()
    os.chdir(folder)  # paths in the files are relative, so that the files are always the same
    try:
        train(config, Path("run"))
    finally:
        os.chdir(before)
    return folder / "run"


def draw_images(folder: Path, classes: int = 8, images: int = 4, side: int = 16) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for c in range(classes):
        (folder / f"class{c}").mkdir(parents=True)
        colour = rng.uniform(0, 255, 3)
        for n in range(images):
            pixels = np.clip(colour + rng.normal(0, 60, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{c}" / f"{n}.png")


def image_files(folder: Path) -> dict[str, bytes]:
    from PIL import Image, features

    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(1).integers(0, 256, (24, 20, 4), np.uint8)
    clear, image = Image.fromarray(pixels), Image.fromarray(pixels[..., :3])
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    image.save(folder / "a.jpg", exif=exif)
    image.save(folder / "b.jpg", progressive=True, subsampling=0)
    image.convert("CMYK").save(folder / "c.jpg")
    clear.save(folder / "a.png")
    image.quantize(16).save(folder / "b.png", transparency=3)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(folder / "c.png")
    image.save(folder / "a.gif", save_all=True, append_images=[image.rotate(90)])
    image.save(folder / "a.bmp")
    image.save(folder / "a.ppm")
    for n, packing in enumerate(("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")):
        image.save(folder / f"{n}.tif", compression=packing)
    Image.fromarray(pixels[..., 0] / np.float32(255)).save(folder / "floats.tif")
    clear.save(folder / "a.webp", lossless=True)
    if features.check("jpg_2000"):
        image.save(folder / "a.jp2")
    if features.check("avif"):
        image.save(folder / "a.avif")
    return _contents(folder)


def model_files(folder: Path) -> dict[str, bytes]:
    """Models of dmltool's own kind and of others."""
    from onnx import TensorProto, helper, numpy_helper

    from tests.exporter.models import PROPERTIES, mean_model, model_of

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2)
    weight = numpy_helper.from_array(rng.standard_normal((4, 3, 3, 3)).astype("f4"), "weight")
    nodes = [
        helper.make_node("Conv", ["x", "weight"], ["maps"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["maps"], ["bent"]),
        helper.make_node("GlobalAveragePool", ["bent"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["y"]),
    ]
    ends = [("x", TensorProto.FLOAT, ["n", 3, 8, 8])], [("y", TensorProto.FLOAT, ["n", 4])]
    made = {
        "own.onnx": mean_model(properties=PROPERTIES),
        "foreign.onnx": model_of(nodes, *ends, weights=[weight]),
        "fixed.onnx": mean_model(shape=(2, 8, 8, 3)),
    }
    return {name: model.SerializeToString() for name, model in made.items()}


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
