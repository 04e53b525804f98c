"""The class bootstrap against a slow loop, simulation, and what must not matter to it."""

import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from retrieval import bootstrap


def sample(seed: int, C: int = 40, spread: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    """Hits whose rate differs between classes, and their classes of 1 to 20 images."""
    rng = np.random.default_rng(seed)
    rate = np.clip(rng.normal(0.6, spread, C), 0, 1)
    classes = np.repeat(np.arange(C), rng.integers(1, 21, C))
    return (rng.random(len(classes)) < rate[classes]).astype(float), classes


def interval(values: np.ndarray, classes: np.ndarray, **options: float) -> tuple[float, float]:
    """The interval of one score (Q,)."""
    low, high = bootstrap.interval(values[:, None], classes, **options)
    return float(low[0]), float(high[0])


def test_interval_agrees_with_a_slow_loop_over_drawn_classes():
    values, classes = sample(0)
    members = [values[classes == c] for c in np.unique(classes)]
    rng = np.random.default_rng(99)
    means = []
    for _ in range(20_000):
        drawn = rng.integers(0, len(members), len(members))
        means.append(np.concatenate([members[c] for c in drawn]).mean())
    expected = np.quantile(means, [0.025, 0.975])
    found = interval(values, classes, resamples=20_000)
    assert found == pytest.approx(expected, abs=0.05 * (expected[1] - expected[0]))


def test_interval_covers_the_true_mean_as_often_as_it_says():
    C, trials = 60, 150
    covered = narrow = 0
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        classes = np.repeat(np.arange(C), 10)
        values = rng.normal(0.5, 0.2, C)[classes] + rng.normal(0, 0.2, len(classes))
        low, high = interval(values, classes, resamples=400, seed=seed)
        covered += low <= 0.5 <= high
        # Every image its own class: the bootstrap over images that this module replaces.
        low, high = interval(values, np.arange(len(values)), resamples=400, seed=seed)
        narrow += low <= 0.5 <= high
    assert 0.90 <= covered / trials <= 0.98
    assert narrow / trials < 0.75


def test_the_interval_of_a_score_does_not_depend_on_the_other_scores():
    hits, classes = sample(1)
    rng = np.random.default_rng(2)
    others = rng.random((len(hits), 5))
    table = np.stack([hits, others[:, 0], 1 - hits, *others.T], axis=1)
    low, high = bootstrap.interval(table, classes)
    for m in range(table.shape[1]):
        assert interval(table[:, m], classes) == (low[m], high[m])
    some = [4, 1]
    assert np.array_equal(bootstrap.interval(table[:, some], classes), (low[some], high[some]))


def test_a_score_that_is_never_less_has_limits_that_are_never_less():
    """Every score sees the same draws."""
    ranks = np.random.default_rng(3).integers(1, 30, 400)
    classes = np.arange(400) % 40
    low, high = bootstrap.interval(ranks[:, None] <= np.arange(1, 30), classes)
    assert (np.diff(low) >= 0).all()
    assert (np.diff(high) >= 0).all()


def test_row_order_does_not_matter():
    # 0.1 + 0.2 + 0.3 depends on the order; the sums must not.
    rng = np.random.default_rng(4)
    hits, classes = sample(2)
    values = np.stack([hits, rng.random(len(hits)), rng.choice([0.1, 0.2, 0.3], len(hits))], axis=1)
    expected = bootstrap.interval(values, classes)
    for _ in range(5):
        order = rng.permutation(len(hits))
        assert np.array_equal(bootstrap.interval(values[order], classes[order]), expected)


def test_the_order_of_class_labels_decides_the_draws_and_nothing_else_about_them():
    values, classes = sample(2)
    expected = interval(values, classes)
    assert interval(values, 1000 * classes - 7) == expected
    assert interval(values, np.char.mod("c%03d", classes)) == expected
    other = interval(values, -classes)
    assert other == pytest.approx(expected, abs=0.01)


def test_the_seed_decides_everything():
    values, classes = sample(6)
    assert interval(values, classes) == interval(values, classes)
    assert interval(values, classes) != interval(values, classes, seed=1)


def test_higher_level_is_wider_and_both_hold_the_mean():
    values, classes = sample(7)
    narrow = interval(values, classes, level=0.5)
    wide = interval(values, classes, level=0.99)
    assert wide[0] < narrow[0] < values.mean() < narrow[1] < wide[1]


def test_one_class_gives_no_interval_rather_than_certainty():
    values, classes = np.array([1.0, 0.0, 1.0]), np.zeros(3, int)
    assert all(map(math.isnan, interval(values, classes)))
    difference, limits, p = bootstrap.paired(values, 1 - values, classes)
    assert difference == pytest.approx(1 / 3)
    assert all(map(math.isnan, (*limits, p)))


def test_no_queries_give_nan():
    assert all(map(math.isnan, interval(np.empty(0), np.empty(0, int))))


def test_paired_difference_of_equal_systems_has_p_one():
    values, classes = sample(8)
    assert bootstrap.paired(values, values, classes) == (0.0, (0.0, 0.0), 1.0)


def test_paired_p_and_interval_agree_and_are_antisymmetric():
    better, classes = sample(9)
    worse = better * (np.random.default_rng(10).random(len(better)) < 0.8)
    difference, (low, high), p = bootstrap.paired(better, worse, classes)
    assert difference == pytest.approx(better.mean() - worse.mean())
    assert 0 < low < difference < high
    assert p == 2 / 2001
    assert bootstrap.paired(worse, better, classes) == (-difference, (-high, -low), p)


@pytest.mark.parametrize("seed", range(20))
def test_paired_is_mirrored_exactly_when_a_and_b_change_places(seed):
    rng = np.random.default_rng(seed)
    classes = np.arange(120) % 12
    a, b = rng.choice([0.0, 0.1, 1 / 3, 0.7, 1.0], (2, 120))
    a[classes == 1], b[classes == 1] = b[classes == 0], a[classes == 0]  # one +g, one -g
    difference, (low, high), p = bootstrap.paired(a, b, classes, 500, 0.9, seed)
    assert bootstrap.paired(b, a, classes, 500, 0.9, seed) == (-difference, (-high, -low), p)


def test_paired_p_is_rarely_small_without_a_difference():
    small = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        classes = np.repeat(np.arange(50), 8)
        shift = rng.normal(0, 0.2, 50)[classes]
        a, b = rng.normal(0, 1, 400) + shift, rng.normal(0, 1, 400) - shift
        small += bootstrap.paired(a, b, classes, resamples=300, seed=seed)[2] < 0.05
    assert small / 200 < 0.11


def test_paired_runs_agree_with_a_loop_over_drawn_seeds_and_classes():
    rng = np.random.default_rng(0)
    sizes = np.full(400, 5)
    gain = rng.integers(-3, 4, (40, 400)) + rng.integers(-1, 2, (40, 1))  # t is nearly normal
    difference, (low, high), p = bootstrap.paired_runs(gain, sizes, resamples=4000)
    assert difference == pytest.approx(gain.sum() / (40 * sizes.sum()))
    drawn = []
    for _ in range(4000):
        seeds, classes = rng.integers(0, 40, 39), rng.integers(0, 400, 400)
        drawn.append(gain[np.ix_(seeds, classes)].sum() / 39 / sizes[classes].sum())
    wide = np.std(drawn)
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.2 * wide)
    below = np.mean(np.array(drawn) <= 0)
    assert p == pytest.approx(2 * min(below, 1 - below), abs=0.1)
    mirrored = bootstrap.paired_runs(-gain, sizes, resamples=4000)
    assert mirrored == (-difference, (-high, -low), p)


def test_differences_of_paired_runs_stay_within_a_hundred_percent():
    gain = np.array([[9.0, 1.0, 2.0], [1.0, 9.0, 8.0]])  # of 10 queries each
    _, (low, high), _ = bootstrap.paired_runs(gain, np.full(3, 10))
    assert -1 <= low < 0 < high == 1


@pytest.mark.parametrize("differ", ["classes", "seeds"])
def test_few_classes_or_seeds_widen_the_interval_by_students_t(differ):
    gain = np.tile(np.arange(5.0), (3, 1))  # five classes, the same for three seeds
    if differ == "seeds":
        gain = gain.T
    found = bootstrap._widening(gain, np.full(gain.shape[1], 10.0), 0.95)
    assert found == pytest.approx(stats.t.ppf(0.975, 4) / stats.norm.ppf(0.975))


def test_paired_runs_see_the_spread_of_seeds():
    """The same mean difference, equal for all seeds or of one seed only."""
    sizes = np.full(20, 10)
    steady = np.full((3, 20), 1)
    shaky = np.concatenate([np.full((1, 20), 5), np.full((2, 20), -1)])
    assert steady.sum() == shaky.sum()
    assert bootstrap.paired_runs(steady, sizes)[2] < 0.01
    assert bootstrap.paired_runs(shaky, sizes)[2] > 0.2


def test_paired_runs_with_one_seed_draw_classes_only():
    rng = np.random.default_rng(1)
    a, b = rng.random((2, 100)) < 0.5
    classes = np.arange(100) % 10
    gain = np.bincount(classes, weights=a * 1.0 - b)[None]
    one = bootstrap.paired_runs(gain, np.full(10, 10))
    other = bootstrap.paired(a, b, classes)
    assert one[0] == pytest.approx(other[0])
    assert one[1] == pytest.approx(other[1], abs=0.05)


@pytest.mark.parametrize("seeds", [3, 5])
def test_paired_runs_are_rarely_significant_without_a_difference(seeds):
    """Seeds, classes and their combination all vary; the true difference is zero."""
    small = 0
    for trial in range(200):
        rng = np.random.default_rng(trial)
        shift = rng.normal(0, 2, (seeds, 1)) + rng.normal(0, 2, (1, 25))
        gain = np.rint(shift + rng.normal(0, 2, (seeds, 25)))
        p = bootstrap.paired_runs(gain, np.full(25, 20), resamples=300, seed=trial)[2]
        small += p < 0.05
    assert small / 200 < 0.1


def test_sop_sized_bootstrap_stays_within_200_megabytes():
    classes = np.repeat(np.arange(11_316), 5)
    values = np.random.default_rng(0).random((len(classes), 4))
    tracemalloc.start()
    bootstrap.interval(values, classes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
