"""HDF5 files that are drawn, not mutated: structure that no damage by the bytes would hit."""

from __future__ import annotations

import random
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.fuzz import seeds
from tests.fuzz.seeds import D, N


def drawn_hdf5(rng: random.Random, place: Path) -> str:
    """Chunks of a wrong length, odd filters, virtual data sets with holes, loops and odd types."""
    import h5py

    latest = {"libver": "latest"} if rng.random() < 0.5 else {}
    with h5py.File(place, "w", **latest) as file:
        rng.choice((_odd_chunks, _odd_chunks, _odd_virtual, _odd_types, _odd_links))(file, rng)
        if "labels" not in file:
            file["labels"] = seeds.labels()
    return ""


def _odd_chunks(file, rng: random.Random) -> None:
    import h5py

    dtype = rng.choice(("f4", "f2", "f8", "i1", "u1", "i4", ">f4"))
    filters = {
        "compression": rng.choice((None, None, "gzip", "lzf")),
        "shuffle": rng.random() < 0.3,
        "fletcher32": rng.random() < 0.3,
    }
    if rng.random() < 0.2 and np.dtype(dtype).kind != "f":
        filters["scaleoffset"] = rng.randint(0, 8)
    chunk = (rng.randint(1, N), rng.randint(1, D))
    rows = rng.choice((N, N, N, N + 1, 1, 0))
    made = file.create_dataset("embeddings", (rows, D), dtype, chunks=chunk, **filters)
    if rng.random() < 0.9 and rows:
        made[:] = seeds.vectors(dtype)[:rows] if rows <= N else 0
    for _ in range(rng.choice((0, 1, 1, 3))):
        if not rows:
            break
        at = (rng.randrange(rows) // chunk[0] * chunk[0], rng.randrange(D) // chunk[1] * chunk[1])
        right = chunk[0] * chunk[1] * made.dtype.itemsize
        size = rng.choice((0, 1, 3, 4, right - 1, right // 2, right + 7, 10 * right))
        content = bytes(rng.randbytes(max(0, size)))
        if filters["compression"] == "gzip" and rng.random() < 0.7:
            content = zlib.compress(content)
        with suppress(OSError, ValueError, RuntimeError):
            mask = rng.choice((0, 0, 1, 2, 3, 255))
            made.id.write_direct_chunk(at, content, mask)
    if rng.random() < 0.2:
        space = h5py.h5s.create_simple((N,))
        h5py.h5d.create(file.id, b"labels", h5py.h5t.NATIVE_INT64, space)  # never written


def _odd_virtual(file, rng: random.Random) -> None:
    file["part"] = seeds.vectors()
    parts = []
    for _ in range(rng.randint(0, 4)):
        place = rng.choice((".", ".", "elsewhere.h5", "%b.h5", "/dev/zero", ""))
        name = rng.choice(("part", "part", "embeddings", "other", "missing", "part%b", ""))
        a = rng.randrange(N)
        parts.append((place, name, a, rng.randint(a + 1, N)))
    fill = rng.choice((None, 0, 7.0, float("nan")))
    kind = "i4" if fill == 0 else rng.choice(("f4", "f8"))
    with suppress(ValueError, OSError, TypeError, RuntimeError):
        seeds.virtual(file, "embeddings", kind, parts, fill)
    if rng.random() < 0.5:
        with suppress(ValueError, OSError, TypeError, RuntimeError):
            seeds.virtual(file, "other", "f4", [(".", "embeddings", 0, N)])


def _odd_types(file, rng: random.Random) -> None:
    import h5py

    kinds = ("S1", "S9", "?", "i2", "u8", "c8", "V3", [("a", "f4"), ("b", "i4")], ("f4", (2,)))
    kind = rng.choice((*kinds, h5py.string_dtype(), h5py.vlen_dtype("f4"), h5py.ref_dtype))
    shape = rng.choice(((N, D), (N,), (N, D, 1), (1, N, D), (), (N, 0), (D, N)))
    with suppress(ValueError, TypeError, OSError, RuntimeError):
        file.create_dataset(rng.choice(("embeddings", "labels", "x")), shape, kind)
    if "embeddings" not in file:
        file["embeddings"] = seeds.vectors()
    if rng.random() < 0.4:
        many = rng.choice((N, N - 1, 0, 10**6))
        texts = [rng.choice(("a", "a\x1b[31m", "é", "x" * 5000, "")) for _ in range(min(many, 60))]
        with suppress(ValueError):
            file.create_dataset("paths", data=texts, dtype=h5py.string_dtype())
    file.attrs[rng.choice(("format", "version", "complete", "distance"))] = rng.choice(
        ("dmltool-embeddings", 1, True, 2**40, "x" * 3000, b"\xff")
    )


def _odd_links(file, rng: random.Random) -> None:
    import h5py

    file["real"] = seeds.vectors()
    file["embeddings"] = rng.choice(
        (
            h5py.SoftLink("/real"),
            h5py.SoftLink("/embeddings"),
            h5py.SoftLink("/nothing"),
            h5py.ExternalLink("elsewhere.h5", "/x"),
            h5py.ExternalLink("/dev/zero", "/x"),
            h5py.ExternalLink(".", "/real"),
        )
    )
    group = file.create_group("g")
    group["loop"] = file["/"] if rng.random() < 0.5 else h5py.SoftLink("/g")
    for _ in range(rng.choice((0, 1, 200))):
        group = group.create_group("g")
