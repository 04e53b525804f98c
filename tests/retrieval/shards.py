"""Sixty vectors with labels and paths, whole or in twelve files of any format."""

import gzip

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import ipc

from retrieval.embeddings import Split
from retrieval.formats.hdf5 import writing as hdf5

N, D = 60, 5
rng = np.random.default_rng(3)
Y = np.arange(N) % 10
X = (rng.standard_normal((10, D))[Y] + rng.standard_normal((N, D))).astype(np.float32)
NAMES = np.array([f"class {y}" for y in Y])
PATHS = np.array([f"{n}.png" for n in range(N)])
# Twelve parts, so that part-10 and part-11 come before part-2 in the order of letters.
PARTS = [slice(5 * n, 5 * n + 5) for n in range(12)]


def write(path, rows):
    """Some rows in the format that the suffix names."""
    table = pd.DataFrame({"label": NAMES[rows], "path": PATHS[rows]})
    table = table.join(pd.DataFrame(X[rows], columns=[f"d{n}" for n in range(D)]))
    suffix = "".join(path.suffixes)
    if suffix == ".npz":
        np.savez(path, embeddings=X[rows], labels=NAMES[rows], paths=PATHS[rows])
    elif suffix == ".parquet":
        table.to_parquet(path)
    elif suffix == ".csv":
        table.to_csv(path, index=False)
    elif suffix == ".csv.gz":
        path.write_bytes(gzip.compress(table.to_csv(index=False).encode()))
    elif suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True, double_precision=15)
    elif suffix == ".h5":
        hdf5.write(path, {"test": Split(X[rows], Y[rows], PATHS[rows])}, np.unique(NAMES))
    elif suffix == ".arrow":
        lists = pa.array(X[rows].tolist(), pa.list_(pa.float32()))
        whole = pa.table({"embedding": lists, "label": NAMES[rows], "path": PATHS[rows]})
        with ipc.new_stream(path, whole.schema) as out:
            out.write_table(whole)


def sharded(folder, suffix):
    folder.mkdir()
    for n, rows in enumerate(PARTS):
        write(folder / f"part-{n}{suffix}", rows)
    return folder
