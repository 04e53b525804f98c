"""Thresholds hold the exact nearness of the nearest positive between them, and closely."""

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import prepare


@pytest.mark.parametrize("size", [1e-15, 1, 1e15])
def test_the_nearest_positive_lies_between_possible_and_sure(rng, size):
    labels = rng.integers(0, 8, 60)
    labels[9] = 99  # no positive
    X = (size * rng.standard_normal((60, 12)) * rng.uniform(0.5, 2, (60, 1))).astype(np.float32)
    counter = TileCounter(prepare(from_arrays(X, labels), ("l2", "cos"), 1 << 20, 1), False)
    limits = counter.limits
    some = labels != 99
    length = np.linalg.norm(X.astype(np.float64), axis=1)
    for d, sure, possible in (
        ("cos", *limits.thresholds[:2]),
        ("l2", *-limits.thresholds[3:]),
    ):
        nearest = counter.nearest[d].index
        assert (nearest >= 0).tolist() == some.tolist()
        dots = np.einsum("ij,ij->i", X.astype(np.float64), X[nearest].astype(np.float64))
        near = dots / (length * length[nearest])
        if d == "l2":  # 2 |q| |x| cos - |x|^2, of lengths that float32 can square
            near = (2 * dots - length[nearest] ** 2) * limits.prepared.scale**2
        assert (possible < near)[some].all()
        assert (near < sure)[some].all()
        gap = sure[some] - possible[some]
        assert gap.max() < 1e-5 * np.abs(near[some]).max()
        assert not np.isfinite(sure[~some]).any()
    item = np.stack(limits.norms).astype(np.float64)
    assert (item[2] < item[0] ** 2).all()
    assert (item[0] ** 2 < item[1]).all()
