"""Vectors, tables and checks that the tests of several formats share."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.forks import Forked

ROOT = Path(__file__).parents[3]
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
X64 = X.astype(np.float64)
Y = np.array([5, 5, 2**53 + 1, 2**53 + 2, 7, 7])
NAMES = np.array(["Straße", "b", "b", "ü", "Straße", "c"])
BIG_X = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
BIG_Y = np.arange(300) // 3
ROWS, LONG = 5000, "b" * 500_000  # padded to the longest, 10 GB
ZEROS = np.zeros((ROWS, 2), np.float32)
HUGE = 10**12  # rows that a file claims


def frame(prefix="f", labels=Y, vectors=X):
    """A table with a column for each dimension and one for labels."""
    names = [f"{prefix}{n}" for n in range(vectors.shape[1])]
    return pd.DataFrame(vectors, columns=names).assign(label=labels)


def arrow_table(labels):
    """A table of ROWS vectors."""
    return pa.table({"e": ZEROS.tolist(), "label": labels})


def npy_header(shape, descr="'<f4'"):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


class Payload:
    """Creates a folder when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


# What is read


def only(found):
    """The split of a file that names none."""
    assert list(found.splits) == ["test"]
    return found.splits["test"]


def equal(vectors, wanted):
    # Text is read as float64, where the shortest digits of a float32 name a neighbour of it.
    text = vectors.dtype == np.float64 and wanted.dtype == np.float32
    np.testing.assert_array_equal(vectors.astype(np.float32) if text else vectors, wanted)


def check(found, labels=Y, vectors=X):
    equal(only(found).vectors, vectors)
    np.testing.assert_array_equal(only(found).labels, labels)


ROUND = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=8)


@st.composite
def items(draw, dtypes=("float32", "float64"), text=True, least=2, finite=False):
    """Vectors (N, D) and labels (N,) of any size."""
    n, d = draw(st.integers(1, 6)), draw(st.integers(least, 5))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    elements = {"allow_nan": False, "allow_infinity": not finite} if dtype.kind == "f" else {}
    x = draw(hnp.arrays(dtype, (n, d), elements=hnp.from_dtype(dtype, **elements)))
    kinds = [st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(0, 3)]
    if text:
        kinds.append(TEXT.map(lambda s: "c" + s))
    y = draw(st.one_of(*(st.lists(kind, min_size=n, max_size=n) for kind in kinds)))
    if isinstance(y[0], str):
        return x, np.array(y, np.str_)
    return x, np.array(y, np.uint64 if max(y) >= 2**63 else np.int64)


def same(found, x, y, exact_dtype=True):
    split = only(found)
    if exact_dtype:
        assert split.vectors.dtype == x.dtype
    np.testing.assert_array_equal(split.vectors, x, strict=exact_dtype)
    assert split.labels.dtype.kind == y.dtype.kind
    np.testing.assert_array_equal(split.labels, y)


# What is refused


def refused(source, match, **options):
    """The error of loading, which comes quickly and says what to do."""
    start = time.perf_counter()
    with pytest.raises(DmlError, match=match) as error:
        load(source, **options)
    # A second is the promise; the first import of a library is not part of it.
    assert time.perf_counter() - start < 5
    assert error.value.what.endswith(".")
    assert error.value.fix
    return error.value


def follow(error, folder):
    """Runs the line of Python that the error advises."""
    words = shlex.split(error.fix[error.fix.index("python -c") :])
    ended, _, errors = Forked(*words[1:], cwd=folder).end(timeout=120)
    assert ended == 0, errors


def run_fix(error, folder):
    """Runs the command after the colon of a fix in a shell."""
    command = error.fix.partition(": ")[2].replace("python -c", f"{sys.executable} -c")
    subprocess.run(command, shell=True, cwd=folder, check=True, timeout=120)


# What a small file takes that would become large or slow

MEASURE = """
import json, resource, sys, time
from retrieval.loading.load import load
from retrieval.errors import DmlError

def peak():
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024

first, *rest = sys.argv[1:]
load(first)  # the libraries are not part of the promise
base, result = peak(), {}
for name in rest:
    start = time.perf_counter()
    try:
        load(*name.split("|")[:1], labels=(name.split("|") + [None])[1])
        told = ""
    except DmlError as error:
        told = str(error)
    result[name] = (peak() - base, time.perf_counter() - start, told)
print(json.dumps(result))
"""


def measure(*names):
    """What was told about each file after the first, a harmless one of its kind.

    The promise is ten times the file and 200 MB; every file here is small, so 200 MB is the limit.
    A name may be followed by | and that of a file of labels.
    """
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, names)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    for name, (taken, seconds, told) in (found := json.loads(run.stdout)).items():
        assert os.path.getsize(name.split("|")[0]) < 2_000_000
        assert taken < 200e6, (name, taken, told)
        assert seconds < 10, (name, seconds, told)  # a second, were the machine idle
    return [told for _, _, told in found.values()]
