"""Compiled loops that count negatives before every positive, for MAP@R and R-precision.

Like `kernels`, they release the GIL. In a tile, `q` and `g` count the queries and the gallery items
of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retrieval.ranking.kernels import NONE, list_marked
from retrieval.resources import compiled


class PositiveLists(NamedTuple):
    """The positives of each query, nearest first: those of query q begin at start[q]."""

    start: np.ndarray  # (Q,)
    limit: np.ndarray  # (Q,) R, how many positives there are
    active: np.ndarray  # (Q,) how many may still stand within R
    total: np.ndarray  # (Q,) negatives before the last active one
    last: np.ndarray  # (Q,) the threshold of the last active one, as `TileQueries` has it
    negatives: np.ndarray  # (P,) negatives before the m-th positive, but not before the one before
    soonest: np.ndarray  # (P,) the least order among the positives that exact arithmetic could give
    groups: np.ndarray  # (P,)
    sure: np.ndarray  # (P,) a negative of this nearness surely is at least as near
    possible: np.ndarray  # (P,) a negative of this nearness possibly is
    nearest: np.ndarray  # (P,) bounds of the squared distance, in float64
    farthest: np.ndarray  # (P,)


class MeasuredPairs(NamedTuple):
    """Pairs of a query and a negative, measured in float64."""

    query: np.ndarray
    first: np.ndarray  # the positives from `first` to before `end` are in doubt
    end: np.ndarray  # to this one and all after it the negative has been added, if it was active
    squared: np.ndarray
    error: np.ndarray
    l2: np.ndarray  # the l2 distance where it is exact, else nan
    square: np.ndarray  # squared length of the negative


class Lattice(NamedTuple):
    """What decides between items of one length where l2 distances have no error."""

    l2: np.ndarray  # (P,) squared l2 distances of the positives
    row: np.ndarray  # (P,) their gallery rows
    square: np.ndarray  # (G,) squared lengths


class Kept(NamedTuple):
    """Negatives of each query that may stand before an active positive, from start[q] on."""

    start: np.ndarray  # (Q,)
    room: np.ndarray  # (Q,) how many there may be
    held: np.ndarray  # (Q,) how many there are
    low: np.ndarray  # float32, bounds of the nearness
    high: np.ndarray
    item: np.ndarray  # int32 gallery rows


class Counted(NamedTuple):
    """What has been counted for some queries by one distance, and is counted on."""

    l2: bool  # else cos
    lists: PositiveLists
    kept: Kept
    groups: np.ndarray  # (G,) rows of one group are equally near to any query


class Row(NamedTuple):
    """A query's row of a tile."""

    cosines: np.ndarray  # (B,) float32
    l2: bool
    twice: np.float32  # 2 |q|
    norms: np.ndarray  # (B,) |x|


# The short functions take arrays that the loops have taken out of named tuples once: each use of an
# array inside a named tuple counts it in and out.


@compiled
def _nearness(row, shift, squares, out):
    """Bounds of the nearness, for l2 from cosines that may be off by `shift`."""
    cosines, twice, norms = row.cosines, row.twice, row.norms
    if row.l2:
        for j in range(len(cosines)):
            out[j] = (cosines[j] + shift) * (twice * norms[j]) - squares[j]
    else:
        for j in range(len(cosines)):
            out[j] = cosines[j]


@compiled
def _mark_reaching(row, shift, squares, threshold, first, marks):
    """Mark the items of a row, from number `first` on, that reach the threshold; returns how many.

    It may round otherwise than `_nearness`: the margins cover both.
    """
    cosines, twice, norms = row.cosines, row.twice, row.norms
    count = np.float32(0)  # a counter of the same width keeps the loop in vector registers
    if row.l2:
        for j in range(len(cosines)):
            reaches = (cosines[j] + shift) * (twice * norms[j]) - squares[j] >= threshold
            marks[j] = reaches
            count += np.float32(reaches)
    else:
        for j in range(len(cosines)):
            reaches = cosines[j] >= threshold
            marks[j] = reaches
            count += np.float32(reaches)
    for j in range(first):
        count -= np.float32(marks[j])
        marks[j] = 0
    return np.int64(count)


@compiled
def _reaching(values, threshold):
    """How many values reach the threshold."""
    count = np.float32(0)
    for j in range(len(values)):
        count += np.float32(values[j] >= threshold)
    return np.int64(count)


@compiled
def _without_positives(values, first, codes, code):
    """Unset the values of positives, and those before number `first`."""
    for j in range(len(values)):
        if codes[j] == code:
            values[j] = np.nan
    values[:first] = np.nan


@compiled
def keep_tile(tile, queries, gallery, moved, first, counted, pairs):
    """Keep the negatives of a tile that may stand before an active positive of their query.

    The queries are the rows of the product. Looks at its pairs from number `first` on. moved: the
    gallery row of the first item. Where a query has no room for all of them, positives that they
    push beyond R become inactive; negatives that still take the room are added to the positives
    (`_credit_kept`). Returns (pair to continue with, pairs listed).
    """
    product, margin = tile.product, tile.margin
    norm, above, below = gallery.norms[0], gallery.norms[1], gallery.norms[2]
    codes, item_codes = queries.codes, gallery.codes
    l2, lists, kept = counted.l2, counted.lists, counted.kept
    active, twice, possible = lists.active, queries.thresholds[2], lists.possible
    base, start, room, held = lists.start, kept.start, kept.room, kept.held
    kept_low, kept_high, kept_item = kept.low, kept.high, kept.item
    A, B = product.shape
    low = np.empty(B, np.float32)
    marks, listed = np.zeros((B + 7) // 8 * 8, np.uint8), np.empty(B, np.int64)
    found = 0
    for i in range(first // B, A):
        if active[i] == 0:
            continue
        row, done = Row(product[i], l2, twice[i], norm), max(0, first - i * B)  # looked at already
        last = possible[base[i] + active[i] - 1]
        near = _mark_reaching(row, margin, below, last, done, marks)
        if near == 0:
            continue
        if held[i] + near > room[i]:
            _nearness(row, -margin, above, low)
            _without_positives(low, done, item_codes, codes[i])
            _cut(i, counted, low)
            if active[i] == 0:
                continue
            last = possible[base[i] + active[i] - 1]
            _mark_reaching(row, margin, below, last, done, marks)
        for j in listed[: list_marked(marks, listed)]:
            if codes[i] == item_codes[j]:
                continue
            if held[i] == room[i]:
                if len(pairs) - found < held[i]:
                    return i * B + j, found
                found = _make_room(i, counted, pairs, found)
                if active[i] == 0:
                    break
            n, cosine, scale = start[i] + held[i], product[i, j], twice[i] * norm[j]
            kept_low[n] = (cosine - margin) * scale - above[j] if l2 else cosine
            kept_high[n] = (cosine + margin) * scale - below[j] if l2 else cosine
            kept_item[n] = moved + j
            held[i] += 1
    return A * B, found


@compiled
def keep_pairs(queries, items, lows, highs, first, counted, pairs):
    """Keep listed negatives from number `first` on, as `keep_tile` keeps those of a tile."""
    lists, kept, found = counted.lists, counted.kept, 0
    for n in range(first, len(queries)):
        q = queries[n]
        if kept.held[q] == kept.room[q]:
            if len(pairs) - found < kept.held[q]:
                return n, found
            found = _make_room(q, counted, pairs, found)
        M = lists.active[q]
        if M > 0 and highs[n] >= lists.possible[lists.start[q] + M - 1]:
            to = kept.start[q] + kept.held[q]
            kept.low[to], kept.high[to], kept.item[to] = lows[n], highs[n], items[n]
            kept.held[q] += 1
    return len(queries), found


@compiled
def _make_room(q, counted, pairs, found):
    """Keep fewer negatives of query q, or none, if many would be left; returns the pairs listed."""
    kept = counted.kept
    _cut(q, counted, np.empty(0, np.float32))
    if kept.held[q] > kept.room[q] // 2:
        found = _credit_kept(q, counted, pairs, found)
    return found


@compiled(inline=True)
def _cut(q, counted, further):
    """Find out which positives of query q its negatives push beyond R: inactive from now on.

    further: the nearness, at least, of negatives beside the kept ones. Negatives that are nearer
    than no active positive are kept no longer.
    """
    lists, kept = counted.lists, counted.kept
    base, limit, active = lists.start[q], lists.limit[q], lists.active[q]
    soonest, sure, possible = lists.soonest, lists.sure, lists.possible
    start, end = kept.start[q], kept.start[q] + kept.held[q]
    low, high, item = kept.low[start:end], kept.high[start:end], kept.item[start:end]
    m, beyond = 0, active  # the first positive beyond R
    while m < beyond:
        middle = (m + beyond) // 2
        threshold = sure[base + middle]
        before = _reaching(low, threshold) + _reaching(further, threshold)
        if limit < soonest[base + middle] + before:
            beyond = middle
        else:
            m = middle + 1
    pushed = 0
    for negatives in lists.negatives[base + m : base + active]:
        pushed += negatives
    threshold = possible[base + m - 1] if m > 0 else np.float32(np.inf)
    lists.total[q] -= pushed
    lists.active[q], lists.last[q] = m, -threshold if counted.l2 else threshold
    count = 0
    for n in range(len(low)):
        low[count], high[count], item[count] = low[n], high[n], item[n]
        count += high[n] >= threshold
    kept.held[q] = count


@compiled
def credit_rest(first, end, counted, pairs):
    """Add the kept negatives of the queries first to end to their positives.

    Returns (query to continue with, pairs listed).
    """
    found = 0
    nothing = np.empty(0, np.float32)
    for q in range(first, end):
        if len(pairs) - found < counted.kept.held[q]:
            return q, found
        _cut(q, counted, nothing)
        found = _credit_kept(q, counted, pairs, found)
    return end, found


@compiled
def _credit_kept(q, counted, pairs, found):
    """Add the kept negatives of query q to the positives that they are at least as near as.

    Where float32 leaves open before which positives a negative stands, it is added to those that
    it surely stands before, and listed in `pairs` (query, item, and the range of positives in
    doubt, as `MeasuredPairs` has it), which has `found` rows. Returns how many there are then.
    """
    lists, kept, groups = counted.lists, counted.kept, counted.groups
    base, M = lists.start[q], lists.active[q]
    sure, possible = lists.sure[base : base + M], lists.possible[base : base + M]
    negatives, positive_groups = lists.negatives[base : base + M], lists.groups[base : base + M]
    listed, added = found, 0
    for n in range(kept.start[q], kept.start[q] + kept.held[q]):
        low, high = kept.low[n], kept.high[n]
        first, end = 0, M  # the first positive that it is possibly as near as
        while first < end:
            middle = (first + end) // 2
            if high >= possible[middle]:
                end = middle
            else:
                first = middle + 1
        # The first that it is surely as near as, or identical to: a tie.
        while end < M and not low >= sure[end] and positive_groups[end] != groups[kept.item[n]]:
            end += 1
        if end < M:
            negatives[end] += 1
            added += 1
        if first < end:
            pairs[listed, 0], pairs[listed, 1] = q, kept.item[n]
            pairs[listed, 2], pairs[listed, 3] = first, end
            listed += 1
    kept.held[q] = 0
    lists.total[q] += added
    _close(q, counted.l2, lists)
    return listed


@compiled(inline=True)
def _close(q, l2, lists):
    """Make the positives of query q inactive that negatives have pushed beyond R."""
    base, active = lists.start[q], lists.active[q]
    M, C = active, lists.total[q]
    while M > 0 and lists.limit[q] < lists.soonest[base + M - 1] + C:
        M -= 1
        C -= lists.negatives[base + M]
    if active > M:
        threshold = lists.possible[base + M - 1] if M > 0 else np.float32(np.inf)
        lists.last[q] = -threshold if l2 else threshold
    lists.active[q], lists.total[q] = M, C


@compiled(inline=True)
def _first_rising(rising, base, count, value):
    """The first of rising[base : base + count] that is no less than value, `count` if none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if value <= rising[base + middle]:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def straighten(lists, ends, index, item_groups):
    """Make the bounds monotone along each list, wider where rounding has bent them; in place.

    Fills all other columns. A group is unset where a positive may be as near as one of another
    group: a tie with it then says nothing of the next.
    """
    sure, possible, nearest, farthest = lists.sure, lists.possible, lists.nearest, lists.farthest
    soonest, groups = lists.soonest, lists.groups
    for q in range(len(lists.start)):
        start, end = lists.start[q], ends[q]
        for r in range(end - 2, start - 1, -1):
            sure[r] = max(sure[r], sure[r + 1])
            nearest[r] = min(nearest[r], nearest[r + 1])
        for r in range(start + 1, end):
            possible[r] = min(possible[r], possible[r - 1])
            farthest[r] = max(farthest[r], farthest[r - 1])
        for r in range(start, end):
            lists.negatives[r], groups[r] = 0, item_groups[index[r]]
            near = r > start and nearest[r] <= farthest[r - 1]
            soonest[r] = soonest[r - 1] if near else r - start + 1
        first = start
        for r in range(start, end):  # runs of one `soonest`
            if soonest[r] != soonest[first]:
                first = r
            if groups[r] != groups[first]:
                groups[first : r + 1] = NONE


@compiled
def credit_pairs(pairs, l2, lists, lattice, tied, unsure):
    """Add measured pairs to the positives, or move them from where they had been added.

    Returns how many (pair, m) are left in `unsure`.

    Items of one length rank alike under both distances: where l2 is exact it decides cos as well,
    one positive at a time, counted in `tied`.
    """
    negatives, left = lists.negatives, 0
    for n in range(len(pairs.query)):
        q, end = pairs.query[n], pairs.end[n]
        base, M = lists.start[q], lists.active[q]
        near, far = pairs.squared[n] - pairs.error[n], pairs.squared[n] + pairs.error[n]
        b = max(pairs.first[n], _first_rising(lists.farthest, base, M, near))
        a = min(end, _first_rising(lists.nearest, base, M, far))
        for m in range(b, min(a, M)):
            r = base + m
            exact = pairs.l2[n] == pairs.l2[n]
            if exact and pairs.square[n] == lattice.square[lattice.row[r]]:
                tied[r] += pairs.l2[n] <= lattice.l2[r]
            else:
                unsure[left, 0] = n
                unsure[left, 1] = m
                left += 1
        if end < M:  # it has been added to the last active positive already
            negatives[base + end] -= 1
            negatives[base + a] += 1
        elif a < M:
            negatives[base + a] += 1
            lists.total[q] += 1
            _close(q, l2, lists)
    return left


@compiled
def list_rows(order, squared, error, l2, items, start, counts, listed):
    """Write the first counts[i] items of each row i in their order, from start[i] on.

    `listed` has the columns of `ListedPositives`.
    """
    index, nearest, farthest, listed_l2 = listed
    for i in range(len(squared)):
        for m in range(counts[i]):
            r, j = start[i] + m, order[i, m]
            index[r] = items[j]
            nearest[r], farthest[r] = squared[i, j] - error[i, j], squared[i, j] + error[i, j]
            if len(listed_l2):
                listed_l2[r] = l2[i, j]


@compiled
def mark_nearest(start, counts, nearest, farthest, marks):
    """Mark the positives of each query that may be its nearest one."""
    for q in range(len(start)):
        bound = np.inf
        for r in range(start[q], start[q] + counts[q]):
            bound = min(bound, farthest[r])
        for r in range(start[q], start[q] + counts[q]):
            marks[r] = nearest[r] <= bound


@compiled
def positions_within(lists, tied, positions, lengths):
    """Write the positions of each query's positives within R, ascending, and how many there are."""
    start, limit, active, negatives = lists.start, lists.limit, lists.active, lists.negatives
    count = 0
    for q in range(len(start)):
        base, before, first = start[q], 0, count
        falls = False
        for m in range(active[q]):
            before += negatives[base + m]
            positions[count] = before + tied[base + m]
            falls |= m > 0 and positions[count] < positions[count - 1]
            count += 1
        if falls:  # positives too close to tell apart may be listed in either order
            positions[first:count].sort()
        end = first
        for n in range(first, count):
            if positions[n] + n - first + 1 <= limit[q]:
                positions[end] = positions[n] + n - first + 1
                end += 1
        lengths[q], count = end - first, end


@compiled
def mark_positives(dots, scales, sums, codes, distances, bits):
    """Turn dot products into distances: dot * scale * scale + sum + sum, one of row and of column.

    `bits` are `distances` as integers. The last bit of each is set for items of the query's class.
    """
    A, B = dots.shape
    for i in range(A):
        scale, added, code = scales[0][i], sums[0][i], codes[0][i]
        for j in range(B):
            distances[i, j] = dots[i, j] * (scale * scales[1][j]) + (added + sums[1][j])
        for j in range(B):
            bits[i, j] = (bits[i, j] & -2) | np.int64(codes[1][j] == code)
