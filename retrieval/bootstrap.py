"""Class bootstrap: how far a score would move with other test classes.

Images of one class succeed and fail together, so classes are drawn with replacement, not images;
intervals over images are too narrow. Deterministic in the seed, and blind to the order of the rows
and to the names of the classes.
"""

from __future__ import annotations

import numpy as np

from retrieval.errors import DmlError

_BLOCK = 1 << 21  # drawn classes per block: 16 MB for each of three temporaries


def interval(
    values: np.ndarray,
    classes: np.ndarray,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float] | tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the mean of values (Q,), or of each column of values (Q, M).

    (nan, nan) with fewer than two classes: one class says nothing about how classes vary, and an
    interval of width zero would look like certainty.
    """
    _check(resamples, level)
    means = _resampled_means(values, classes, resamples, seed)  # (resamples, M)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return (float(low[0]), float(high[0])) if np.ndim(values) == 1 else (low, high)


def paired(
    a: np.ndarray,
    b: np.ndarray,
    classes: np.ndarray,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, tuple[float, float], float]:
    """mean(a) - mean(b) over the same queries (Q,), its interval, and a two-sided p value.

    p is twice the smaller share of resampled differences on either side of zero, so that it agrees
    with the interval: p < 1 - level when the interval leaves zero out. The observed sample counts
    as one more resample, p is never 0. nan with fewer than two classes.
    """
    _check(resamples, level)
    gain = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    means = _resampled_means(gain, classes, resamples, seed)[:, 0]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    tail = min(np.count_nonzero(means <= 0), np.count_nonzero(means >= 0))
    p = min(1.0, 2 * (1 + tail) / (1 + resamples)) if np.isfinite(low) else float("nan")
    mean = float(gain.mean()) if len(gain) else float("nan")
    return mean, (float(low), float(high)), p


def _check(resamples: int, level: float) -> None:
    if resamples < 1:
        raise DmlError(f"{resamples} resamples", "At least one is needed.", "Try 2000.")
    if not 0 < level < 1:
        raise DmlError(f"Confidence level {level}", "It lies between 0 and 1.", "Try 0.95.")


def _resampled_means(
    values: np.ndarray, classes: np.ndarray, resamples: int, seed: int
) -> np.ndarray:
    """(resamples, M) means over the queries of C classes drawn with replacement."""
    table = _class_table(np.asarray(values, np.float64), np.asarray(classes))  # (C, 1 + M)
    C = len(table)
    if C < 2:
        return np.full((resamples, table.shape[1] - 1), np.nan)
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, table.shape[1] - 1))
    step = max(1, _BLOCK // C)
    for start in range(0, resamples, step):
        n = min(step, resamples - start)
        drawn = rng.integers(0, C, size=(n, C))
        drawn += np.arange(n)[:, None] * C
        weights = np.bincount(drawn.ravel(), minlength=n * C).reshape(n, C)
        sums = weights.astype(np.float64) @ table  # (n, 1 + M)
        means[start : start + n] = sums[:, 1:] / sums[:, :1]
    return means


def _class_table(values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Per class: queries, and the sum of each column; rows in an order that no name decides."""
    columns = values[:, None] if values.ndim == 1 else values  # (Q, M)
    names, member = np.unique(classes, return_inverse=True)
    # Summed in the order of the values: the order of the rows must not change the last bit,
    # as that could reorder two classes below.
    order = np.lexsort((*columns.T, member))
    table = np.zeros((len(names), 1 + columns.shape[1]))
    table[:, 0] = np.bincount(member, minlength=len(names))
    for m in range(columns.shape[1]):
        table[:, 1 + m] = np.bincount(
            member[order], weights=columns[order, m], minlength=len(names)
        )
    return table[np.lexsort(table.T)]
