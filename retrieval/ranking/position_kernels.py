"""Compiled loops that count negatives before every positive, for MAP@R and R-precision.

Like `kernels`, they release the GIL. In a tile, `q` and `g` count the queries and the gallery items
of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retrieval.ranking.kernels import NONE
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


class Kept(NamedTuple):
    """Negatives of each query that may stand before an active positive, from start[q] on."""

    start: np.ndarray  # (Q,)
    room: np.ndarray  # (Q,) how many there may be
    held: np.ndarray  # (Q,) how many there are
    low: np.ndarray  # float32, bounds of the nearness
    high: np.ndarray
    item: np.ndarray  # int32 gallery rows


# Times 256^k, its first byte is k.
_NUMBER_OF_BYTE = np.uint64(0x0001020304050607)

# The short functions take arrays that the loops have taken out of named tuples once: each use of an
# array inside a named tuple counts it in and out.


@compiled
def _mark(row, margin, transposed, l2, twice, norms, last, i, marks):
    """Mark the pairs of row i that possibly reach the last active positive of their query."""
    if transposed and l2:
        norm, w_lo = norms[0, i], norms[2, i]
        for j in range(len(row)):
            marks[j] = (row[j] + margin) * (twice[j] * norm) >= w_lo - last[j]
    elif transposed:
        for j in range(len(row)):
            marks[j] = row[j] >= last[j]
    elif l2:
        norm, w_lo, factor, threshold = norms[0], norms[2], twice[i], last[i]
        for j in range(len(row)):
            marks[j] = (row[j] + margin) * (factor * norm[j]) >= w_lo[j] - threshold
    else:
        threshold = last[i]
        for j in range(len(row)):
            marks[j] = row[j] >= threshold


@compiled
def keep_tile(tile, l2, queries, gallery, moved, first, lists, kept, groups, pairs):
    """Keep the negatives of a tile that may stand before an active positive of their query.

    Looks at the pairs of the product from number `first` on. moved: the gallery row of the first
    item. Where a query has no room left, positives that its negatives push beyond R become
    inactive; negatives that still take the room are added to the positives (`credit_kept`). Returns
    (pair to go on from, pairs listed).
    """
    product, margin, transposed = tile.product, tile.margin, tile.transposed
    norms, query_codes, item_codes = gallery.norms, queries.codes, gallery.codes
    last, active, twice, possible = lists.last, lists.active, queries.thresholds[2], lists.possible
    base, start, room, counts = lists.start, kept.start, kept.room, kept.held
    lows, highs, items = kept.low, kept.high, kept.item
    A, B = product.shape
    marks = np.zeros((B + 7) // 8 * 8, np.uint8)
    words = marks.view(np.uint64)  # eight marks at a glance: most are zero
    found = 0
    for i in range(first // B, A):
        if not transposed and active[i] == 0:
            continue
        row = product[i]
        _mark(row, margin, transposed, l2, twice, norms, last, i, marks)
        marks[: max(0, first - i * B)] = 0  # they have been looked at
        for word in range(len(words)):
            left = words[word]
            while left != 0:
                mark = left & (~left + np.uint64(1))  # the lowest one
                left ^= mark
                j = 8 * word + np.int64((mark * _NUMBER_OF_BYTE) >> np.uint64(56))
                q, g = (j, i) if transposed else (i, j)
                if query_codes[q] == item_codes[g]:
                    continue
                low = high = row[j]
                if l2:
                    p = twice[q] * norms[0, g]
                    low, high = (low - margin) * p - norms[1, g], (high + margin) * p - norms[2, g]
                if active[q] == 0 or not high >= possible[base[q] + active[q] - 1]:
                    continue  # it was moved since the row was marked
                if counts[q] == room[q]:
                    _cut(q, l2, lists, kept)
                    if counts[q] > room[q] // 2:
                        if len(pairs) - found < counts[q]:
                            return i * B + j, found
                        found = credit_kept(q, q + 1, l2, lists, kept, groups, pairs, found)[1]
                    if not transposed:  # the rest of the row, by a threshold that has moved
                        _mark(row, margin, transposed, l2, twice, norms, last, i, marks)
                n = start[q] + counts[q]
                lows[n], highs[n], items[n] = low, high, moved + g
                counts[q] += 1
    return A * B, found


@compiled(inline=True)
def _cut(q, l2, lists, kept):
    """Find out which positives of query q its kept negatives push beyond R: inactive from now on.

    Negatives that are nearer than no active positive are kept no longer.
    """
    base, limit, active = lists.start[q], lists.limit[q], lists.active[q]
    soonest, sure, possible = lists.soonest, lists.sure, lists.possible
    start, end = kept.start[q], kept.start[q] + kept.held[q]
    low, high, item = kept.low[start:end], kept.high[start:end], kept.item[start:end]
    m, beyond = 0, active  # the first positive beyond R
    while m < beyond:
        middle = (m + beyond) // 2
        threshold, before = sure[base + middle], np.float32(0)
        for n in range(len(low)):
            before += np.float32(low[n] >= threshold)
        if limit < soonest[base + middle] + np.int64(before):
            beyond = middle
        else:
            m = middle + 1
    for r in range(base + m, base + active):
        lists.total[q] -= lists.negatives[r]
    lists.active[q], count = m, 0
    threshold = possible[base + m - 1] if m > 0 else np.float32(np.inf)
    lists.last[q] = -threshold if l2 else threshold
    for n in range(len(low)):
        low[count], high[count], item[count] = low[n], high[n], item[n]
        count += high[n] >= threshold
    kept.held[q] = count


@compiled
def credit_kept(first, end, l2, lists, kept, groups, pairs, found):
    """Add the kept negatives of the queries first to end to their positives, as `credit_all` does.

    Returns (query to go on from, pairs listed).
    """
    most = min(len(pairs) - found, np.sum(kept.held[first:end]))
    queries, items = np.empty(most, np.int64), np.empty(most, np.int64)
    lows, highs = np.empty(most, np.float32), np.empty(most, np.float32)
    count, q = 0, first
    while q < end and count + kept.held[q] <= most:
        _cut(q, l2, lists, kept)
        for n in range(kept.start[q], kept.start[q] + kept.held[q]):
            queries[count], items[count] = q, kept.item[n]
            lows[count], highs[count] = kept.low[n], kept.high[n]
            count += 1
        kept.held[q] = 0
        q += 1
    return q, credit_all(queries[:count], items, lows, highs, l2, lists, groups, pairs, found)


@compiled
def credit_all(queries, items, lows, highs, l2, lists, groups, pairs, found):
    """Add negatives to the positives that they are at least as near as.

    Where float32 leaves open before which positives a negative stands, it is added to those that
    it surely stands before, and listed in `pairs` (query, item, and the range of positives in
    doubt, as `MeasuredPairs` has it), which has `found` rows. Returns how many there are then.
    """
    start, limit, active, total, last = lists[:5]
    negatives, soonest, positive_groups, sure, possible = lists[5:10]
    sign = np.float32(-1 if l2 else 1)
    for n in range(len(queries)):
        q, g, low, high = queries[n], items[n], lows[n], highs[n]
        base, M = start[q], active[q]
        if M == 0 or not high >= possible[base + M - 1]:
            continue
        first, end = 0, M  # the first positive that it is possibly as near as
        while first < end:
            middle = (first + end) // 2
            if high >= possible[base + middle]:
                end = middle
            else:
                first = middle + 1
        # The first that it is surely as near as, or identical to: a tie.
        while end < M and not low >= sure[base + end] and positive_groups[base + end] != groups[g]:
            end += 1
        if end < M:
            _credit(q, end, sign, start, limit, active, total, last, negatives, soonest, possible)
        if first < min(end, active[q]):
            pairs[found, 0], pairs[found, 1] = q, g
            pairs[found, 2], pairs[found, 3] = first, end
            found += 1
    return found


@compiled(inline=True)
def _credit(q, m, sign, start, limit, active, total, last, negatives, soonest, possible):
    """Add a negative that is at least as near as the positives of query q from the m-th on.

    Positives that are now beyond R are no longer active.
    """
    base, M, C = start[q], active[q], total[q] + 1
    negatives[base + m] += 1
    while M > 0 and limit[q] < soonest[base + M - 1] + C:
        M -= 1
        C -= negatives[base + M]
    if active[q] > M:
        last[q] = sign * possible[base + M - 1] if M > 0 else sign * np.inf
    active[q], total[q] = M, C


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
def straighten(lists, ends):
    """Make the bounds monotone along each list, wider where rounding has bent them; in place.

    Fills `soonest`. A group is unset where a positive may be as near as one of another group: a
    tie with it then says nothing of the next.
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
            near = r > start and nearest[r] <= farthest[r - 1]
            soonest[r] = soonest[r - 1] if near else r - start + 1
        first = start
        for r in range(start, end):  # runs of one `soonest`
            if soonest[r] != soonest[first]:
                first = r
            if groups[r] != groups[first]:
                groups[first : r + 1] = NONE


@compiled
def credit_pairs(pairs, l2, lists, positive_l2, positive_square, tied, unsure):
    """Add measured pairs to the positives, or move them from where they had been added.

    Returns how many (pair, m) are left in `unsure`.

    Items of one length rank alike under both distances: where l2 is exact it decides cos as well,
    one positive at a time, counted in `tied`.
    """
    start, limit, active, total, last = lists[:5]
    negatives, soonest, possible = lists.negatives, lists.soonest, lists.possible
    sign = np.float32(-1 if l2 else 1)
    left = 0
    for n in range(len(pairs.query)):
        q, end = pairs.query[n], pairs.end[n]
        base, M = start[q], active[q]
        near, far = pairs.squared[n] - pairs.error[n], pairs.squared[n] + pairs.error[n]
        b = max(pairs.first[n], _first_rising(lists.farthest, base, M, near))
        a = min(end, _first_rising(lists.nearest, base, M, far))
        for m in range(b, min(a, M)):
            r = base + m
            if pairs.square[n] == positive_square[r] and pairs.l2[n] == pairs.l2[n]:
                tied[r] += pairs.l2[n] <= positive_l2[r]
            else:
                unsure[left, 0] = n
                unsure[left, 1] = m
                left += 1
        if end < M:  # it has been added to the last active positive already
            negatives[base + end] -= 1
            negatives[base + a] += 1
        elif a < M:
            _credit(q, a, sign, start, limit, active, total, last, negatives, soonest, possible)
    return left


@compiled
def list_rows(squared, error, l2, items, start, counts, index, listed):
    """Write the first counts[i] items of each row i, nearest first, from start[i] on.

    `listed` has the arrays for the squared distance, its error and the l2 distance of each.
    """
    listed_squared, listed_error, listed_l2 = listed
    for i in range(len(squared)):
        order = np.argsort(squared[i], kind="mergesort")
        for m in range(counts[i]):
            r, j = start[i] + m, order[m]
            index[r], listed_l2[r] = items[j], l2[i, j]
            listed_squared[r], listed_error[r] = squared[i, j], error[i, j]


@compiled
def mark_nearest(start, counts, squared, error, marks):
    """Mark the positives of each query that may be its nearest one."""
    for q in range(len(start)):
        bound = np.inf
        for r in range(start[q], start[q] + counts[q]):
            bound = min(bound, squared[r] + error[r])
        for r in range(start[q], start[q] + counts[q]):
            marks[r] = squared[r] - error[r] <= bound


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
