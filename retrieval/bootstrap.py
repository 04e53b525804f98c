"""Estimate by a bootstrap over classes how much a score depends on the choice of classes.

Images of one class succeed and fail together, so classes are drawn with replacement, not images;
intervals over images are too narrow. What is drawn depends on the seed and the classes alone, which
are taken in the order of their labels: every score, distance and file sees the same draws. Sums are
exact: the order of the rows, the other scores and the sign of a difference change no digit.
"""

from __future__ import annotations

import math

import numpy as np

from retrieval import metrics
from retrieval.resources import slices

_BLOCK = 1 << 21  # drawn classes per block: 16 MB for each of three temporaries


def interval(
    values: np.ndarray,
    classes: np.ndarray,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval (M,), (M,) of the mean of each column of values (Q, M).

    (nan, nan) with fewer than two classes: one class says nothing about how classes vary, and an
    interval of width zero would look like certainty.
    """
    return _limits(_resampled_means(values, classes, resamples, seed), level)


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
    gain = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    means = _resampled_means(gain[:, None], classes, resamples, seed)  # (resamples, 1)
    return metrics.mean(gain), *_tested(means, level)


def paired_runs(
    gain: np.ndarray,
    sizes: np.ndarray,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, tuple[float, float], float]:
    """Difference of two settings that were trained with the same S seeds; its interval; p.

    Seeds and classes are drawn at once, both with replacement: another training and other classes
    would both move the scores. Of S seeds, S - 1 are drawn: the variance of their mean is then the
    usual estimate s^2 / S, which drawing S would make too small by (S - 1) / S. What a few seeds
    say about their spread is itself uncertain, so the drawn differences are moved away from their
    mean by the quantile of Student's t over that of the normal distribution, with Satterthwaite's
    degrees of freedom. With one seed only classes are drawn. nan with fewer than two classes.

    Parameters
    ----------
    gain : array (S, C)
        Hits of one setting less those of the other, for each seed and class.
    sizes : array (C,)
        Queries of each class.
    """
    gain, sizes = np.asarray(gain, np.float64), np.asarray(sizes, np.float64)
    S, C = gain.shape
    mean = float(gain.sum() / (S * sizes.sum())) if gain.size else float("nan")
    if C < 2:
        return mean, (float("nan"), float("nan")), float("nan")
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, 1))
    for part in slices(resamples, max(1, _BLOCK // C)):
        n = part.stop - part.start
        of_classes = rng.multinomial(C, np.full(C, 1 / C), size=n)  # (n, C)
        of_seeds = rng.multinomial(max(1, S - 1), np.full(S, 1 / S), size=n)  # (n, S)
        hits = ((of_seeds @ gain) * of_classes).sum(axis=1)
        means[part, 0] = hits / (max(1, S - 1) * (of_classes @ sizes))
    means = mean + _widening(gain, sizes, level) * (means - mean)
    return mean, *_tested(means.clip(-1, 1), level)  # no difference of shares is larger


def _widening(gain: np.ndarray, sizes: np.ndarray, level: float) -> float:
    """Student's t quantile over the normal one; larger for few seeds or classes."""
    from scipy import stats  # takes half a second

    S, C = gain.shape
    of_seeds = gain.sum(axis=1) / sizes.sum()  # (S,) a difference for each seed
    residuals = gain.mean(axis=0) - of_seeds.mean() * sizes  # (C,) of a ratio of sums
    parts = [(float(np.var(residuals, ddof=1)) * C / sizes.sum() ** 2, C - 1)]
    if S > 1:
        parts.append((float(np.var(of_seeds, ddof=1)) / S, S - 1))
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return 1.0
    freedom = total**2 / sum(variance**2 / count for variance, count in parts)
    tail = (1 + level) / 2
    return float(stats.t.ppf(tail, freedom) / stats.norm.ppf(tail))


def _tested(means: np.ndarray, level: float) -> tuple[tuple[float, float], float]:
    """The interval of resampled differences (resamples, 1), and the p value that goes with it."""
    [low], [high] = _limits(means, level)
    tail = min(np.count_nonzero(means <= 0), np.count_nonzero(means >= 0))
    p = min(1.0, 2 * (1 + tail) / (1 + len(means))) if np.isfinite(low) else float("nan")
    return (float(low), float(high)), float(p)


def _limits(means: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper limits (M,); the limits of -means are exactly mirrored."""
    low, high = (np.quantile(side, (1 - level) / 2, axis=0) for side in (means, -means))
    return low, -high


def _resampled_means(
    values: np.ndarray, classes: np.ndarray, resamples: int, seed: int
) -> np.ndarray:
    """(resamples, M) means over the queries of C classes drawn with replacement."""
    sizes, sums, unit = _class_sums(np.asarray(values, np.float64), np.asarray(classes))
    C = len(sizes)
    if C < 2:
        return np.full((resamples, sums.shape[1]), np.nan)
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, sums.shape[1]))
    for part in slices(resamples, max(1, _BLOCK // C)):
        n = part.stop - part.start
        drawn = rng.integers(0, C, size=(n, C)) + np.arange(n)[:, None] * C
        weights = np.bincount(drawn.ravel(), minlength=n * C).reshape(n, C).astype(np.float64)
        means[part] = (weights @ sums) * unit / (weights @ sizes)[:, None]
    return means


def _class_sums(
    columns: np.ndarray, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries of each class (C,); sums of each column (C, M) in whole multiples of unit (M,).

    The unit is a power of two so coarse that no sum of C of them is rounded, so fine that 2^-50 of
    the largest is kept: the products above are the same whatever else is multiplied beside them.
    """
    _, member, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    C, order = len(sizes), np.argsort(member, kind="stable")
    sums = np.zeros((C, columns.shape[1]))
    for m, column in enumerate(columns.T):
        if np.array_equal(column, np.rint(column)):  # whole numbers: exact in any order
            sums[:, m] = np.bincount(member, weights=column, minlength=C)
        else:
            by_class = np.split(column[order], np.cumsum(sizes)[:-1])
            sums[:, m] = [math.fsum(values.tolist()) for values in by_class]
    top = np.abs(sums).max(axis=0, initial=0.0) * max(C, 1)
    unit = np.ldexp(1.0, np.frexp(np.where(top > 0, top, 1.0))[1] - 52)
    return sizes.astype(np.float64), np.rint(sums / unit), unit
