"""python -m benchmarks.report: `dmltool report` on the shape of SOP with images, to RESULTS.md.

`--items 3000 --dry` tries it in half a minute and records nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.loader import photo
from benchmarks.measure import clustered, machine, record, table
from retrieval.embeddings import Split
from retrieval.formats.hdf5.writing import write

ITEMS, DIM, NOISE = 60_502, 512, 2.2
PER_CLASS = 60_502 / 11_316
PHOTOS, SIZE = 24, (400, 300)
COMMAND = [Path(sys.executable).parent / "dmltool", "report"]


def write_images(folder: Path, items: int) -> np.ndarray:
    """Paths of `items` different JPEG files: windows of a few large photographs."""
    photos = [photo(n) for n in range(PHOTOS)]
    names = [f"{n // 1000:02}/{n:05}.jpg" for n in range(items)]

    def save(n: int) -> None:
        whole, rng = photos[n % PHOTOS], np.random.default_rng(n)
        x, y = (int(rng.integers(0, whole.size[axis] - SIZE[axis])) for axis in (0, 1))
        whole.crop((x, y, x + SIZE[0], y + SIZE[1])).save(folder / names[n], quality=90)

    for part in {name[:2] for name in names}:
        (folder / part).mkdir()
    with ThreadPoolExecutor() as pool:
        list(pool.map(save, range(items)))
    return np.array(names)


def write_embeddings(path: Path, items: int, paths: np.ndarray) -> int:
    classes = round(items / PER_CLASS)
    vectors, labels = clustered(items, DIM, classes, NOISE)
    names = np.array([f"product {n:05}" for n in range(classes)])
    write(path, {"test": Split(vectors, labels, paths)}, names, {"model": "generated"})
    return classes


def measured(arguments: list) -> tuple[float, float, int]:
    """Seconds, seconds of all processors, and the peak of resident memory in bytes."""
    start = time.perf_counter()
    running = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(running.pid, 0)
    seconds = time.perf_counter() - start
    running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        raise SystemExit(running.returncode)
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--note", default="", help="a sentence about the circumstances")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        paths = write_images(folder / "images", given.items)
        classes = write_embeddings(folder / "sop.h5", given.items, paths)
        for title, more in (
            ("with images", ["--images", folder / "images"]),
            ("without images", []),
        ):
            out = folder / f"{title}.html"
            seconds, busy, peak = measured([folder / "sop.h5", "--out", out, *more])
            rows.append(
                [
                    title,
                    f"{seconds:.0f}",
                    f"{busy:.0f}",
                    f"{peak / 1e6:,.0f}",
                    f"{out.stat().st_size / 1e6:.1f}",
                ]
            )
            print(rows[-1], flush=True)
    text = (
        f"{machine('numpy', 'numba', 'scikit-learn', 'pillow')}.\n\n"
        f"`dmltool report` on {given.items:,} x {DIM} of {classes:,} classes, JPEG files of "
        f"{SIZE[0]} x {SIZE[1]}, each different. The peak is that of the whole process. Goals: "
        f"3 minutes, 2 GB, 25 MB. {given.note}\n\n"
        + table(["", "seconds", "CPU seconds", "peak, MB", "page, MB"], rows)
    )
    print(text)
    if not given.dry:
        record("Report", text)


if __name__ == "__main__":
    main()
