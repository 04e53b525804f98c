"""Compiled loops that count negatives before every positive, for MAP@R and R-precision.

Like `kernels`, they release the GIL. In a tile, `q` and `g` count the queries and the gallery items
of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retrieval.ranking.kernels import CHUNK, NONE
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


# The short functions take arrays that the loops have taken out of `PositiveLists` once: each use of
# an array inside a named tuple counts it in and out.


@compiled(inline=True)
def _mark(row, margin, transposed, l2, twice, norms, last, i, first, end, hits):
    """Mark the pairs of row i that possibly reach the last active positive; returns how many."""
    count = np.float32(0)
    if transposed and l2:
        norm, w_lo = norms[0, i], norms[2, i]
        for j in range(first, end):
            hit = np.float32((row[j] + margin) * (twice[j] * norm) >= w_lo - last[j])
            hits[j - first] = hit
            count += hit
    elif transposed:
        for j in range(first, end):
            hit = np.float32(row[j] >= last[j])
            hits[j - first] = hit
            count += hit
    elif l2:
        factor, t_lo = twice[i], last[i]
        for j in range(first, end):
            hit = np.float32((row[j] + margin) * (factor * norms[0, j]) >= norms[2, j] - t_lo)
            hits[j - first] = hit
            count += hit
    else:
        threshold = last[i]
        for j in range(first, end):
            hit = np.float32(row[j] >= threshold)
            hits[j - first] = hit
            count += hit
    return count


@compiled
def credit_tile(tile, l2, queries, gallery, first, lists, pairs):
    """Add the negatives of a tile to the positives that they are at least as near as.

    Looks at the rows of the product from `first` on, a few columns at a time: most have nothing
    to add. Where float32 leaves open before which positives a negative stands, it is added to
    those that it surely stands before, and listed in `pairs` (query, item, and the range of
    positives in doubt, as `MeasuredPairs` has it). Returns (row to go on from, pairs listed).
    """
    product, margin, transposed = tile.product, tile.margin, tile.transposed
    norms, query_codes, item_codes = gallery.norms, queries.codes, gallery.codes
    last, active, twice = lists.last, lists.active, queries.thresholds[2]
    A, B = product.shape
    hits, cosines = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    candidates = np.empty((CHUNK, 2), np.int64)
    found = 0
    for i in range(first, A):
        if pairs.shape[0] - found < B:
            return i, found
        if not transposed and active[i] == 0:
            continue
        row = product[i]
        for start in range(0, B, CHUNK):
            # The last active positive of a query moves with every negative that is added.
            end = min(start + CHUNK, B)
            if _mark(row, margin, transposed, l2, twice, norms, last, i, start, end, hits) == 0:
                continue
            count = 0
            for j in range(start, end):
                q, g = (j, i) if transposed else (i, j)
                if hits[j - start] > 0 and query_codes[q] != item_codes[g]:
                    candidates[count, 0], candidates[count, 1] = q, g
                    cosines[count] = row[j]
                    count += 1
            found = credit_candidates(
                candidates[:count], cosines, margin, l2, queries, gallery, lists, pairs, found
            )
    return A, found


@compiled
def credit_candidates(candidates, cosines, margin, l2, queries, gallery, lists, pairs, found):
    """Add negatives to the positives that they are at least as near as, given one by one.

    candidates (n, 2): query and item of a tile. `pairs` has `found` rows and is filled as by
    `credit_tile`; returns how many there are then.
    """
    start, limit, active, total, last = lists[:5]
    negatives, soonest, groups, sure, possible = lists[5:10]
    norms, item_groups, twice = gallery.norms, gallery.groups, queries.thresholds[2]
    sign = np.float32(-1 if l2 else 1)
    for n in range(len(candidates)):
        q, g = candidates[n, 0], candidates[n, 1]
        base, M = start[q], active[q]
        low = high = cosines[n]
        if l2:
            p = twice[q] * norms[0, g]
            low, high = (low - margin) * p - norms[1, g], (high + margin) * p - norms[2, g]
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
        while end < M and not low >= sure[base + end] and groups[base + end] != item_groups[g]:
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
