"""The loops that NumPy cannot fuse, compiled by numba and cached on disk.

All release the GIL: the engine runs one tile per thread. Sums may be reassociated (vectorised);
every margin they are compared with covers any order of summation.
"""

from __future__ import annotations

import numpy as np
from numba import njit

ANY, NONE = -2, -3  # groups that every item, or no item, belongs to
_SUMS = {"reassoc", "contract", "nsz"}  # never "nnan": a NaN cell must compare false


def compiled(function=None, *, fastmath=_SUMS):
    """numba's njit, cached on disk where any folder for that can be written."""
    if function is None:
        return lambda f: compiled(f, fastmath=fastmath)
    try:
        return njit(nogil=True, cache=True, fastmath=fastmath)(function)
    except RuntimeError:  # no such folder: compiled anew in every process
        return njit(nogil=True, fastmath=fastmath)(function)


@compiled
def count_rows(S, e, ask, item, counts):
    """Rows of S (A, B) ask: how many of its columns are surely nearer than the row's threshold.

    ask (5, A): cos hi, cos lo, 2|q|, l2 tau hi, l2 tau lo; item (3, B): |x|, |x|^2 hi, |x|^2 lo.
    counts (4, A): cos sure, cos possible, l2 sure, l2 possible.
    """
    A, B = S.shape
    norm, w_hi, w_lo = item[0], item[1], item[2]
    for i in range(A):
        cos_hi, cos_lo, g, t_hi, t_lo = ask[0, i], ask[1, i], ask[2, i], ask[3, i], ask[4, i]
        # float32 counters keep all lanes of one width; exact below 2^24 columns.
        a = b = c = d = np.float32(0)
        for j in range(B):
            s = S[i, j]
            p = g * norm[j]
            a += np.float32(s >= cos_hi)
            b += np.float32(s >= cos_lo)
            c += np.float32((s - e) * p >= w_hi[j] - t_hi)
            d += np.float32((s + e) * p >= w_lo[j] - t_lo)
        counts[0, i] = np.int32(a)
        counts[1, i] = np.int32(b)
        counts[2, i] = np.int32(c)
        counts[3, i] = np.int32(d)


@compiled
def count_columns(S, e, ask, item, counts):
    """The same for the columns of S: ask (5, B), item (3, A), counts (4, B)."""
    A, B = S.shape
    cos_hi, cos_lo, g, t_hi, t_lo = ask[0], ask[1], ask[2], ask[3], ask[4]
    sure_cos, maybe_cos, sure_l2, maybe_l2 = counts[0], counts[1], counts[2], counts[3]
    for j in range(B):
        sure_cos[j] = maybe_cos[j] = sure_l2[j] = maybe_l2[j] = 0
    for i in range(A):
        norm, w_hi, w_lo = item[0, i], item[1, i], item[2, i]
        for j in range(B):
            s = S[i, j]
            p = g[j] * norm
            sure_cos[j] += np.int32(s >= cos_hi[j])
            maybe_cos[j] += np.int32(s >= cos_lo[j])
            sure_l2[j] += np.int32((s - e) * p >= w_hi - t_hi[j])
            maybe_l2[j] += np.int32((s + e) * p >= w_lo - t_lo[j])


@compiled
def doubtful(
    S, e, l2, rows, cols, rows_ask, ask, item, q_label, g_label, q_group, g_group, tied, pairs
):
    """Lists the cells whose verdict float32 leaves open, rows x cols being those to look at.

    q_group[i] is the group of identical rows that the asker's nearest right item belongs to: an
    item of that group (any item, for ANY) is a tie, added to `tied`, no arithmetic needed.
    Returns the number of pairs (asker, item) written, -1 if `pairs` (P, 2) is too short.
    """
    found = 0
    for i in rows:
        for j in cols:
            s = S[i, j]
            q, g = (i, j) if rows_ask else (j, i)
            if l2:
                p = ask[2, q] * item[0, g]
                sure = (s - e) * p >= item[1, g] - ask[3, q]
                possible = (s + e) * p >= item[2, g] - ask[4, q]
            else:
                sure = s >= ask[0, q]
                possible = s >= ask[1, q]
            if possible and not sure and q_label[q] != g_label[g]:
                if q_group[q] == g_group[g] or q_group[q] == ANY:
                    tied[q] += 1
                    continue
                if found == pairs.shape[0]:
                    return -1
                pairs[found, 0] = q
                pairs[found, 1] = g
                found += 1
    return found


@compiled
def count_float64(
    P, first, w_q, w_g, limit, slack, own, q_label, g_label, q_group, g_group, counts, ties, pairs
):
    """Rows of the float64 product P ask, by squared distance w_q + w_g - 2 P.

    limit (2, A): sure below limit[0], possible up to limit[1]. slack: (per w, per root of w,
    constant). own[i] is the column of the asker itself, or -1. Counts and known ties are added
    up, open pairs listed; returns (row to go on from, pairs listed), row A when it is done.
    """
    A, B = P.shape
    found = 0
    for i in range(first, A):
        if pairs.shape[0] - found < B:
            return i, found
        root = np.sqrt(w_q[i])
        for j in range(B):
            if j == own[i]:
                continue
            w = w_q[i] + w_g[j]
            d = w - 2.0 * P[i, j]
            err = slack[0] * w + slack[1] * (root + np.sqrt(w_g[j])) + slack[2]
            if d + err < limit[0, i]:
                counts[i] += 1
            elif not (d - err > limit[1, i]) and q_label[i] != g_label[j]:
                if q_group[i] == g_group[j] or q_group[i] == ANY:
                    counts[i] += 1
                    ties[i] += 1
                else:
                    pairs[found, 0] = i
                    pairs[found, 1] = j
                    found += 1
    return A, found


@compiled
def _credit(q, m, start, limit, active, total, wrong, soonest, possible, last, sign):
    """One more wrong item at least as near as query q's right items from the m-th on.

    Right items whose place is now beyond `limit` no longer count: active shrinks to those before.
    soonest: the least m that exact order could give each, as near ones are listed in any order.
    """
    base, M, C = start[q], active[q], total[q] + 1
    wrong[base + m] += 1
    while M > 0 and limit[q] < soonest[base + M - 1] + C:
        M -= 1
        C -= wrong[base + M]
    if active[q] > M:
        last[q] = sign * possible[base + M - 1] if M > 0 else sign * np.inf
    active[q], total[q] = M, C


@compiled
def place(
    S, e, l2, askers, first, rows_ask, scale, item, q_label, g_label, g_group,
    start, limit, active, total, wrong, soonest, group, sure, possible, last, pairs
):  # fmt: skip
    """Credits the wrong items of a tile to the right items that they are at least as near as.

    The askers are rows of S, or columns. Asker q's right items are start[q]:start[q + 1], nearest
    first: a wrong item surely is as near as those with nearness >= sure, possibly as those with
    nearness >= possible. Pairs that float32 leaves open are listed; returns (asker to go on from,
    pairs listed). `last` is what the counting kernels compare with, kept up to date.
    """
    items = S.shape[1] if rows_ask else S.shape[0]
    sign = np.float32(-1 if l2 else 1)
    found = 0
    for n in range(first, len(askers)):
        if pairs.shape[0] - found < items:
            return n, found
        q = askers[n]
        base = start[q]
        for j in range(items):
            M = active[q]
            if M == 0:
                break
            s = S[q, j] if rows_ask else S[j, q]
            low = high = s
            if l2:
                p = scale[q] * item[0, j]
                low, high = (s - e) * p - item[1, j], (s + e) * p - item[2, j]
            if not high >= possible[base + M - 1] or q_label[q] == g_label[j]:
                continue
            b = _first(possible, base, M, high)
            a = _first(sure, base, M, low)
            for m in range(b, a):
                if group[base + m] == g_group[j]:  # identical rows: a tie, no arithmetic needed
                    a = m
                    break
            if b < a:
                pairs[found, 0] = q
                pairs[found, 1] = j
                found += 1
            elif a < M:
                _credit(q, a, start, limit, active, total, wrong, soonest, possible, last, sign)
    return len(askers), found


@compiled
def _first(falling, base, count, value):
    """The first of falling[base : base + count] that value reaches, `count` if none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if value >= falling[base + middle]:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
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
def straighten(start, sure, possible, nearest, farthest, soonest, group):
    """Makes bounds fall, or rise, along each query's list, widening them where rounding bent them.

    sure and possible fall with m; nearest and farthest rise. All in place. soonest (out): the
    least place that each right item could have among the right ones. group: unset where an item
    may be as near as one that is not identical; a tie with it then says nothing of the next.
    """
    for q in range(len(start) - 1):
        for r in range(start[q + 1] - 2, start[q] - 1, -1):
            sure[r] = max(sure[r], sure[r + 1])
            nearest[r] = min(nearest[r], nearest[r + 1])
        for r in range(start[q] + 1, start[q + 1]):
            possible[r] = min(possible[r], possible[r - 1])
            farthest[r] = max(farthest[r], farthest[r - 1])
        for r in range(start[q], start[q + 1]):
            near = r > start[q] and nearest[r] <= farthest[r - 1]
            soonest[r] = soonest[r - 1] if near else r - start[q] + 1
        first = start[q]
        for r in range(start[q], start[q + 1]):  # runs of one `soonest`
            if soonest[r] != soonest[first]:
                first = r
            if group[r] != group[first]:
                group[first : r + 1] = NONE


@compiled
def place_pairs(
    q, value, error, level, square, l2, start, limit, active, total, wrong, soonest, tied,
    nearest, farthest, right_level, right_square, possible, last, unsure
):  # fmt: skip
    """The same for pairs measured in float64; returns how many (pair, m) are left in `unsure`.

    Right item m lies between squared distances nearest[m] and farthest[m]. `level` is the l2
    distance where that is exact, else nan: items of one length rank alike under both distances.
    """
    sign = np.float32(-1 if l2 else 1)
    left = 0
    for n in range(len(q)):
        base, M = start[q[n]], active[q[n]]
        b = _first_rising(farthest, base, M, value[n] - error[n])
        a = _first_rising(nearest, base, M, value[n] + error[n])
        for m in range(b, a):
            r = base + m
            if square[n] == right_square[r] and level[n] == level[n]:
                tied[r] += level[n] <= right_level[r]
            else:
                unsure[left, 0] = n
                unsure[left, 1] = m
                left += 1
        if a < M:
            _credit(q[n], a, start, limit, active, total, wrong, soonest, possible, last, sign)
    return left


@compiled
def pair_distances(Q, q_row, G, g_row, q_inverse, g_inverse, l2, cos):
    """Squared distances of pairs in float64: l2 by direct differences; cos as squared chord.

    The chord |q/|q| - x/|x||^2 = 2 - 2 cos keeps its digits where 1 - cos has lost them.
    q_inverse, g_inverse: 1 / norm of each pair's rows, 0 for a zero row, whose cos is 0.
    """
    D = Q.shape[1]
    for n in range(q_row.shape[0]):
        q, g = q_row[n], g_row[n]
        a, b = q_inverse[n], g_inverse[n]
        plain = chord = 0.0
        for k in range(D):
            x, y = np.float64(Q[q, k]), np.float64(G[g, k])
            plain += (x - y) * (x - y)
            u = x * a - y * b
            chord += u * u
        l2[n] = plain
        cos[n] = chord if a > 0.0 and b > 0.0 else 2.0


@compiled(fastmath=False)
def hash_rows(words, keys, out):
    """A 64-bit hash of each row of words (N, D): every bit of a word reaches every bit of it.

    Words of small numbers differ in a few high bits only; multiplied and added up, they collide.
    """
    N, D = words.shape
    for i in range(N):
        h = np.uint64(0)
        for k in range(D):  # the finaliser of SplitMix64
            w = np.uint64(words[i, k]) + keys[k]
            w = (w ^ (w >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            w = (w ^ (w >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            h += w ^ (w >> np.uint64(31))
        out[i] = h
