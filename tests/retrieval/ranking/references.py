"""Ranks and positions by independent means: whole numbers, float64 brute force and FAISS."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import lcm

import faiss
import numpy as np
from hypothesis import strategies as st

from retrieval.problem import from_arrays
from retrieval.ranking.backends.choice import VARIABLE
from retrieval.ranking.ranks import Ranks, count_ranks

DISTANCES = ("cos", "l2")
BACKENDS = ("numpy", "torch")


@contextmanager
def counted_by(backend: str) -> Iterator[None]:
    """Ranks on the CPU, by NumPy or by torch."""
    before = os.environ.pop(VARIABLE, "")
    os.environ[VARIABLE] = backend
    try:
        yield
    finally:
        os.environ[VARIABLE] = before


def ranks_of(
    gallery, gallery_labels, queries=None, query_labels=None, *, self_ids=None, **options
) -> dict[str, Ranks]:
    if queries is None:
        problem = from_arrays(gallery, gallery_labels)
    else:
        problem = from_arrays(queries, query_labels, gallery, gallery_labels)
    if self_ids is not None:
        problem = replace(problem, self_ids=np.asarray(self_ids))
    return count_ranks(problem, **options)


def assert_exact(*args, self_ids=None, **options):
    """Both backends give the exact ranks and ties; torch skips no pairs by leading axes."""
    expected = exact_ranks(*args, self_ids=self_ids)
    for backend in BACKENDS[:1] if "axes" in options else BACKENDS:
        with counted_by(backend):
            result = ranks_of(*args, self_ids=self_ids, **options)
        for distance, pairs in expected.items():
            got = list(zip(result[distance].rank, result[distance].ties, strict=True))
            assert got == pairs, (backend, distance)


def listed(positions) -> list[list[int]]:
    """The positions of each query's positives."""
    return [part.tolist() for part in np.split(positions.positions, positions.offsets[1:-1])]


def whole_numbers(*arrays):
    """Rows of Python integers: all values times one power of two, so that nothing is rounded.

    Neither the order of distances nor that of cosines changes. Fractions would be as exact, and
    ten times as slow.
    """
    ratios = [[[float(v).as_integer_ratio() for v in row] for row in rows] for rows in arrays]
    common = max((d for rows in ratios for row in rows for _, d in row), default=1)
    return [[[n * (common // d) for n, d in row] for row in rows] for rows in ratios]


def remembered(function):
    """Keep what is exact of the same arrays: several tests count them in different ways."""
    known = {}

    def recall(*args, **options):
        arrays = [np.asarray(x) for x in (*args, *options.values())]
        key = (*options, *((x.dtype.str, x.shape, x.tobytes()) for x in arrays))
        if key not in known:
            known[key] = function(*args, **options)
        return known[key]

    return recall


@remembered
def exact_ranks(gallery, gallery_labels, queries=None, query_labels=None, self_ids=None):
    """Ranks and ties by whole numbers: no rounding anywhere."""
    if queries is None:
        queries, query_labels, self_ids = gallery, gallery_labels, range(len(gallery))
    if self_ids is None:
        self_ids = [-1] * len(queries)
    rows, queries = whole_numbers(gallery, queries)
    out = {}
    for distance in ("cos", "l2"):
        found = []
        for q, label, own in zip(queries, query_labels, self_ids, strict=True):
            near = nearness(q, rows, distance)
            right = [s for j, s in enumerate(near) if gallery_labels[j] == label and j != own]
            wrong = [s for j, s in enumerate(near) if gallery_labels[j] != label and j != own]
            best = max(right, default=None)
            found.append(
                (1 + sum(s >= best for s in wrong), sum(s == best for s in wrong))
                if right
                else (0, 0)
            )
        out[distance] = found
    return out


def nearness(q, rows, distance):
    """Whole numbers that are larger, the nearer a row is."""
    if distance == "l2":
        return [-sum((a - b) ** 2 for a, b in zip(q, x, strict=True)) for x in rows]
    dots = [sum(a * b for a, b in zip(q, x, strict=True)) for x in rows]
    inverse = inverse_squares(tuple(map(tuple, rows)))
    # sign(cos) cos^2 times |q|^2, and times what makes all of them whole; 0 for a row of zeros
    return [dot * abs(dot) * factor for dot, factor in zip(dots, inverse, strict=True)]


@lru_cache(4)
def inverse_squares(rows):
    """The inverse squares of lengths, times the least number that makes them whole."""
    squares = [sum(b * b for b in x) for x in rows]
    common = lcm(*(square for square in squares if square))
    return [common // square if square else 0 for square in squares]


def float64_ranks(X, labels, distance):
    """Leave-one-out in plain NumPy float64, for data without near-ties."""
    X = X.astype(np.float64)
    if distance == "cos":
        X = X / np.linalg.norm(X, axis=1, keepdims=True)
    far = ((X[:, None] - X[None]) ** 2).sum(-1)
    same = labels[:, None] == labels[None]
    np.fill_diagonal(far, np.inf)
    best = np.where(same, far, np.inf).min(axis=1)
    rank = 1 + (~same & (far <= best[:, None])).sum(axis=1)
    return np.where(np.isinf(best), 0, rank)


def faiss_neighbours(X, distance):
    """(N, N - 1) the nearest other rows of each row by FAISS, for data without ties."""
    X = np.ascontiguousarray(X, np.float32)
    if distance == "cos":
        X = X / np.linalg.norm(X, axis=1, keepdims=True)
    _, ids = faiss.knn(X, X, len(X))
    return np.stack([row[row != n] for n, row in enumerate(ids)])


@remembered
def exact_positions(
    gallery, gallery_labels, queries=None, query_labels=None, *, distance, self_ids=None
):
    """The positions of all positives of each query, exactly; negatives first among equals."""
    if queries is None:
        queries, query_labels, self_ids = gallery, gallery_labels, range(len(gallery))
    rows, queries = whole_numbers(gallery, queries)
    found = []
    for i, q in enumerate(queries):
        near = [
            (-near, bool(gallery_labels[j] == query_labels[i]))
            for j, near in enumerate(nearness(q, rows, distance))
            if self_ids is None or j != self_ids[i]
        ]
        near.sort()  # False before True: negatives first
        found.append([position for position, (_, positive) in enumerate(near, 1) if positive])
    return found


def hard_cases():
    rng = np.random.default_rng(1)
    N, D = 36, 4
    one = np.full((N, D), 0.3, np.float32)
    normal = rng.standard_normal((N, D))
    base = normal[: N // 3].astype(np.float32)
    pairs = np.float32(5_900_000) + np.arange(N // 4, dtype=np.float32)[:, None] + [1, 0]
    return {
        "random float32": normal.astype(np.float32),
        "random float16": normal.astype(np.float16),
        "random float64": normal,
        "int8": rng.integers(-2, 3, (N, D)).astype(np.int8),
        "uint8": rng.integers(0, 256, (N, D)).astype(np.uint8),
        "binary": rng.integers(0, 2, (N, D)).astype(np.float32),
        "normalised signs": np.float32(512**-0.5) * np.sign(normal).astype(np.float32),
        "all equal": one,
        "differ in the last bit": np.where(normal > 0.3, np.nextafter(one, np.float32(1)), one),
        "norms 1e-20 to 1e20": (normal * 10.0 ** rng.integers(-20, 21, (N, 1))).astype(np.float32),
        "norms in float64": normal * 10.0 ** rng.integers(-60, 61, (N, 1)),
        "zero rows": np.where(rng.random((N, 1)) < 0.4, 0, normal).astype(np.float32),
        "duplicated rows": np.repeat(base, 3, axis=0),
        "one live unit": np.where(np.arange(D) == 2, np.abs(normal), 0).astype(np.float32),
        "multiples of 0.1": np.float32(0.1) * rng.integers(-1, 2, (N, D)).astype(np.float32),
        "multiples of 0.1 in float64": 0.1 * rng.choice([-4.0, -1.0, 0.0, 1.0, 2.0], (N, D)),
        "nearly multiples of 0.1": rng.choice([0.1, 0.2, 0.1 + 0.2, 0.3, 0.0], (N, D)),
        "one-hot rows in float64": 0.7 * np.eye(12)[rng.integers(0, 12, N)],
        "sparse rows": np.where(rng.random((N, D)) < 0.3, normal, 0),
        "parallel rows": np.concatenate([base, 3 * base, base * np.float32(1.1)]),
        "opposite rows": np.concatenate([base, -base, 2 * base]),
        "collapsed": (1 + 1e-7 * normal).astype(np.float32),
        "collapsed float64": 1 + normal * 10.0 ** -rng.integers(12, 17, (N, 1)),
        # Of opposite ones, one length and nearly one direction, float64 cannot tell the cosines.
        "opposite integers": np.concatenate([pairs, pairs[:, ::-1], -pairs, -pairs[:, ::-1]]),
        "one outlier": np.concatenate([normal[:-1], 1e15 * normal[-1:]]).astype(np.float32),
    }


HARD = hard_cases()


values = st.sampled_from(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        3.0,
        0.1,
        float(np.nextafter(np.float32(0.1), np.float32(1))),
        1e-20,
        1e20,
    ]
)
