"""Compiled loops that count negatives before positives, against plain loops."""

import numpy as np

from retrieval.ranking import position_kernels


def lists_of(limit, active, negatives):
    """Lists of positives of which only the counts matter."""
    limit, P = np.array(limit), sum(limit)
    numbers, single = np.zeros(P), np.zeros(P, np.float32)
    return position_kernels.PositiveLists(
        start=np.cumsum(limit) - limit,
        limit=limit,
        active=np.array(active),
        total=np.zeros_like(limit),
        last=np.zeros(len(limit), np.float32),
        negatives=np.array(negatives),
        soonest=np.zeros(P, np.int64),
        groups=np.zeros(P, np.int64),
        sure=single,
        possible=single.copy(),
        nearest=numbers,
        farthest=numbers.copy(),
    )


def test_positions_within_r_follow_from_the_negatives_before_each_positive(rng):
    limit = [4, 0, 3, 6]
    for _ in range(20):
        active = [int(rng.integers(0, most + 1)) for most in limit]
        negatives, tied = rng.integers(0, 2, (2, sum(limit)))
        lists = lists_of(limit, active, negatives)
        positions, lengths = np.empty(sum(limit), np.int64), np.empty(4, np.int64)
        position_kernels.positions_within(lists, tied, positions, lengths)
        wanted = []
        for start, most, count in zip(lists.start, limit, active, strict=True):
            before = np.cumsum(negatives[start : start + count]) + tied[start : start + count]
            places = [n + m for m, n in enumerate(sorted(before.tolist()), 1)]
            wanted.append([place for place in places if place <= most])
        assert lengths.tolist() == [len(places) for places in wanted]
        assert positions[: lengths.sum()].tolist() == [place for one in wanted for place in one]


def test_bounds_become_monotone_and_wider_only(rng):
    limit = np.array([5, 1, 30])
    lists = lists_of(limit.tolist(), limit.tolist(), [0] * 36)
    near = np.concatenate([np.sort(rng.random(n)) for n in limit])
    lists.nearest[:], lists.farthest[:] = near - 0.02 * rng.random(36), near + 0.02 * rng.random(36)
    lists.sure[:], lists.possible[:] = 0.01 * rng.random(36) - near, -0.01 * rng.random(36) - near
    before = [array.copy() for array in (lists.sure, lists.possible, lists.nearest, lists.farthest)]
    ends = np.cumsum(limit)
    position_kernels.straighten(lists, ends, np.zeros(36, np.int32), np.array([7]))
    for start, end in zip(lists.start, ends, strict=True):
        part = slice(start, end)
        assert (np.diff(lists.sure[part]) <= 0).all()
        assert (np.diff(lists.possible[part]) <= 0).all()
        assert (np.diff(lists.nearest[part]) >= 0).all()
        assert (np.diff(lists.farthest[part]) >= 0).all()
        for n in range(start, end):  # as many positives are surely nearer
            surely = (lists.farthest[start:n] < lists.nearest[n]).sum()
            assert lists.soonest[n] <= surely + 1
    sure, possible, nearest, farthest = before
    assert (lists.sure >= sure).all()
    assert (lists.possible <= possible).all()
    assert (lists.nearest <= nearest).all()
    assert (lists.farthest >= farthest).all()


def test_positives_are_marked_in_the_last_bit_of_their_distance(rng):
    dots, scales = rng.standard_normal((4, 6)), (rng.random(4), rng.random(6))
    sums, codes = (rng.random(4), rng.random(6)), (np.arange(4) % 2, np.arange(6) % 3)
    distances = np.empty((4, 6))
    position_kernels.mark_positives(dots, scales, sums, codes, distances, distances.view(np.int64))
    wanted = dots * scales[0][:, None] * scales[1] + sums[0][:, None] + sums[1]
    np.testing.assert_allclose(distances, wanted, rtol=1e-14, atol=1e-15)
    positive = codes[0][:, None] == codes[1]
    assert np.array_equal(distances.view(np.int64) & 1, positive)
