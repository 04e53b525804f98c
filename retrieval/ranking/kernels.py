"""Compiled loops that count negatives in a tile of the product of queries and gallery.

All of them release the GIL, so every thread works on a tile of its own. Sums may be added up in
any order: each margin covers every order of summation. In a tile, `q` and `g` count the queries
and the gallery items of the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retrieval.resources import compiled

ANY, NONE = -2, -3  # groups that every item, or no item, belongs to
_ULP32, _LEAST = 2.0**-24, 2.0**-148  # of float32: unit roundoff, above its least number
_NUMBER_OF_BYTE = np.uint64(0x0001020304050607)  # times 256^k, its first byte is k


class Tile(NamedTuple):
    """A block of cosines in float32."""

    product: np.ndarray  # (A, B)
    margin: np.float32  # how far a cosine may be off
    transposed: bool  # the queries are the columns, not the rows


class TileQueries(NamedTuple):
    """The queries of a tile."""

    thresholds: np.ndarray  # (5, A) float32: cos sure, cos possible, 2 |q|, l2 sure, l2 possible
    codes: np.ndarray  # (A,) classes
    groups: np.ndarray  # (A,) the group of rows that tie with the nearest positive


class TileGallery(NamedTuple):
    """The gallery items of a tile."""

    norms: np.ndarray  # (3, B) float32: |x|, and bounds above and below |x|^2
    codes: np.ndarray  # (B,)
    groups: np.ndarray  # (B,) rows of one group are equally near to any query


class Reach(NamedTuple):
    """The least nearness that can change a count of each row (or column) of a tile, and its norms.

    As a query, a row has the bounds `cos` and `l2`; as a gallery item, it has `norm` and `square`.
    """

    cos: np.ndarray  # (A,) float32: the least cosine that can change a count of the query
    l2: np.ndarray  # (A,) float32: the same for l2, in the form of `TileQueries`
    twice: np.ndarray  # (A,) float32: 2 |q|
    norm: np.ndarray  # (A,) float32: |x|
    square: np.ndarray  # (A,) float32: a bound below |x|^2

    def take(self, rows: np.ndarray | slice) -> Reach:
        """The same for some rows."""
        return Reach(*(field[rows] for field in self))


class Tails(NamedTuple):
    """Unit vectors, and how long they are apart from their leading axes."""

    length: np.ndarray  # (A,) float32, rounded up
    units: np.ndarray  # (A, D) float32


class Float64Queries(NamedTuple):
    """The queries of a tile that is computed in float64."""

    squares: np.ndarray  # (A,) squared lengths
    limits: np.ndarray  # (2, A): surely nearer below the first, possibly up to the second
    self_columns: np.ndarray  # (A,) the column that is the query itself, or -1
    codes: np.ndarray
    groups: np.ndarray


class Float64Gallery(NamedTuple):
    """The gallery items of such a tile."""

    squares: np.ndarray  # (B,)
    codes: np.ndarray
    groups: np.ndarray


class ClassQueries(NamedTuple):
    """Queries of a class."""

    self_ids: np.ndarray  # (A,) the gallery row that is the query itself, -1: none
    twice: np.ndarray  # (A,) float32: 2 |q|


class ClassItems(NamedTuple):
    """Gallery items of a class."""

    rows: np.ndarray  # (B,)
    norm: np.ndarray  # (B,) float32: |x|


class ClassRows(NamedTuple):
    """Queries or gallery items of a class, measured in float64."""

    row: np.ndarray  # (A,) gallery rows; -1 for a query that is none
    square: np.ndarray  # (A,) |x|^2
    inverse: np.ndarray  # (A,) 1 / |x|, 0 for a zero row


class Nearness(NamedTuple):
    """How a squared distance becomes the nearness that a product in float32 is compared with.

    The nearness is base - squared * scales[0] * scales[1]; it may be off by slack, and by
    `relative` times itself.
    """

    base: np.ndarray  # (Q,)
    slack: np.ndarray  # (Q,)
    scales: tuple[float, float]  # their product may leave the range of float64
    relative: float


class PairRows(NamedTuple):
    """One side of a list of pairs."""

    vectors: np.ndarray
    row: np.ndarray  # (n,) rows of `vectors`
    scale: np.ndarray  # (n,) 1; or 1 / norm of each, 0 for a zero row


@compiled
def list_marked(marks, listed):
    """List the places of all marks that are 1, eight marks at a glance; returns how many."""
    words, count = marks.view(np.uint64), 0
    for word in range(len(words)):
        left = words[word]
        while left != 0:
            mark = left & (~left + np.uint64(1))  # the lowest one
            left ^= mark
            listed[count] = 8 * word + np.int64((mark * _NUMBER_OF_BYTE) >> np.uint64(56))
            count += 1
    return count


@compiled
def _mark_mattering(row, margin, row_length, lengths, rows, columns, i, marks):
    """Mark the pairs of row i that a query may need, and make all of them -2."""
    cos, l2, twice = rows.cos[i], rows.l2[i], rows.twice[i]
    norm, square = rows.norm[i], rows.square[i]
    for j in range(len(row)):
        most = row[j] + row_length * lengths[j]  # what the cosine can be
        high = most + margin
        # |, not `or`: a branch would keep the loop out of the vector registers.
        near = (most >= cos) | (most >= columns.cos[j])
        near |= high * (twice * columns.norm[j]) >= columns.square[j] - l2
        near |= high * (columns.twice[j] * norm) >= square - columns.l2[j]
        marks[j] = near
    row[:] = np.float32(-2)


@compiled
def complete_product(product, margin, row_tails, column_tails, rows, columns):
    """Turn a product of heads into the cosine where the pair may matter; other pairs become -2.

    A pair matters if the most that the tails can add makes it reach a threshold of its row or of
    its column. -2 is less than any cosine, so it reaches none.
    """
    A, B = product.shape
    marks, listed = np.zeros((B + 7) // 8 * 8, np.uint8), np.empty(B, np.int64)
    lengths, row_units, column_units = column_tails.length, row_tails.units, column_tails.units
    for i in range(A):
        row, unit = product[i], row_units[i]
        _mark_mattering(row, margin, row_tails.length[i], lengths, rows, columns, i, marks)
        for j in listed[: list_marked(marks, listed)]:
            other, cosine = column_units[j], np.float32(0)
            for k in range(len(unit)):
                cosine += unit[k] * other[k]
            row[j] = cosine


@compiled
def count_rows(product, margin, thresholds, norms, wanted, counts):
    """Count for each row of the product the columns that are nearer than its thresholds.

    wanted: whether to count by cos, and by l2. counts (4, A): cos sure, cos possible, l2 sure, l2
    possible.
    """
    A, B = product.shape
    norm, w_hi, w_lo = norms[0], norms[1], norms[2]
    for i in range(A):
        # float32 counters keep all lanes of one width; exact below 2^24 columns.
        a = b = c = d = np.float32(0)
        if wanted[0]:
            cos_hi, cos_lo = thresholds[0, i], thresholds[1, i]
            for j in range(B):
                s = product[i, j]
                a += np.float32(s >= cos_hi)
                b += np.float32(s >= cos_lo)
        if wanted[1]:
            twice, t_hi, t_lo = thresholds[2, i], thresholds[3, i], thresholds[4, i]
            for j in range(B):
                s = product[i, j]
                p = twice * norm[j]
                c += np.float32((s - margin) * p >= w_hi[j] - t_hi)
                d += np.float32((s + margin) * p >= w_lo[j] - t_lo)
        counts[0, i] = np.int32(a)
        counts[1, i] = np.int32(b)
        counts[2, i] = np.int32(c)
        counts[3, i] = np.int32(d)


@compiled
def count_columns(product, margin, thresholds, norms, wanted, counts):
    """Count the same for each column of the product, where the queries are the columns.

    Two rows at a time: the counters are read and written half as often.
    """
    A, B = product.shape
    cos_hi, cos_lo, twice = thresholds[0], thresholds[1], thresholds[2]
    t_hi, t_lo = thresholds[3], thresholds[4]
    sure_cos, maybe_cos, sure_l2, maybe_l2 = counts[0], counts[1], counts[2], counts[3]
    counts[:] = 0
    no_row = np.full(B, np.nan, np.float32)  # reaches nothing
    for i in range(0, A, 2):
        n = min(i + 1, A - 1)
        first, second = product[i], product[n] if n > i else no_row
        if wanted[0]:
            for j in range(B):
                high, low = cos_hi[j], cos_lo[j]
                sure_cos[j] += np.int32(first[j] >= high) + np.int32(second[j] >= high)
                maybe_cos[j] += np.int32(first[j] >= low) + np.int32(second[j] >= low)
        if wanted[1]:
            norm, w_hi, w_lo = norms[0, i], norms[1, i], norms[2, i]
            norm_2, w_hi_2, w_lo_2 = norms[0, n], norms[1, n], norms[2, n]
            for j in range(B):
                high, low, p, r = t_hi[j], t_lo[j], twice[j] * norm, twice[j] * norm_2
                sure_l2[j] += np.int32((first[j] - margin) * p >= w_hi - high)
                sure_l2[j] += np.int32((second[j] - margin) * r >= w_hi_2 - high)
                maybe_l2[j] += np.int32((first[j] + margin) * p >= w_lo - low)
                maybe_l2[j] += np.int32((second[j] + margin) * r >= w_lo_2 - low)


@compiled
def doubtful(tile, l2, queries, gallery, rows, columns, tied, pairs):
    """List the negatives for which float32 leaves the verdict open, in these rows and columns.

    A negative in the group of the nearest positive (any, for ANY) is a tie without arithmetic and
    is added to `tied`. Returns the number of pairs (q, g) written, -1 if `pairs` is too short.
    """
    product, margin = tile.product, tile.margin
    thresholds, norms = queries.thresholds, gallery.norms
    found = 0
    for i in rows:
        for j in columns:
            s = product[i, j]
            q, g = (j, i) if tile.transposed else (i, j)
            if l2:
                p = thresholds[2, q] * norms[0, g]
                sure = (s - margin) * p >= norms[1, g] - thresholds[3, q]
                possible = (s + margin) * p >= norms[2, g] - thresholds[4, q]
            else:
                sure = s >= thresholds[0, q]
                possible = s >= thresholds[1, q]
            if possible and not sure and queries.codes[q] != gallery.codes[g]:
                if queries.groups[q] == gallery.groups[g] or queries.groups[q] == ANY:
                    tied[q] += 1
                    continue
                if found == pairs.shape[0]:
                    return -1
                pairs[found, 0] = q
                pairs[found, 1] = g
                found += 1
    return found


@compiled
def near_members(cosines, l2, margin, queries, items, best):
    """List the pairs of a class that may be the nearest of their query: row, column, nearness.

    The nearness is the most that it can be: of cos, or of 2 |q| |x| cos - |x|^2. best (A,): the
    largest lower bound so far; it rises.
    """
    A, B = cosines.shape
    rows, columns = np.empty(A * B, np.int64), np.empty(A * B, np.int64)
    highs, low, high = np.empty(A * B, np.float32), np.empty(B, np.float32), np.empty(B, np.float32)
    self_ids, twice, item_rows, norm = queries.self_ids, queries.twice, items.rows, items.norm
    found = 0
    for i in range(A):
        factor, own, top = twice[i], self_ids[i], best[i]
        for j in range(B):
            near, error = cosines[i, j], margin
            if l2:
                square = norm[j] * norm[j]
                near = near * (factor * norm[j]) - square
                # A norm below the normal float32 numbers is off by as much as the least of them.
                error = factor * (margin * norm[j] + np.float32(2.0**-148))
                error += np.float32(8 * 2.0**-24) * square + np.float32(2.0**-100)
            low[j], high[j] = near - error, near + error
        for j in range(B):
            if low[j] > top and item_rows[j] != own:
                top = low[j]
        for j in range(B):
            if high[j] >= top and item_rows[j] != own:
                rows[found], columns[found], highs[found] = i, j, high[j]
                found += 1
        best[i] = top
    return rows[:found], columns[:found], highs[:found]


@compiled(fastmath=False)
def nearness_bounds(form, q, near, far, sure, possible):
    """Bounds of the nearness of items between the squared distances near and far from queries q.

    Surely at least as near is what reaches `sure`, possibly what reaches `possible`: both are
    rounded outward to float32.
    """
    base, slack, (first, second), relative = form
    for n in range(len(q)):
        most = base[q[n]] - near[n] * first * second
        least = base[q[n]] - far[n] * first * second
        size = max(abs(most), abs(least))
        off = slack[q[n]] + relative * size
        off += 2 * _ULP32 * (size + off) + _LEAST
        sure[n], possible[n] = np.float32(most + off), np.float32(least - off)


@compiled(fastmath=False)
def class_distances(dots, queries, items, cos_unit, l2_unit, limit, out):
    """Squared distances of a class and their errors, from dot products in float64.

    The errors are 2 cos_unit for cos, and l2_unit times the squared lengths for l2. Fills `out`:
    distance and error for cos and for l2, all (A, B), and where an error is above `limit` times
    its distance, or a row is zero. A query is infinitely far from itself.
    """
    cos, cos_error, l2, l2_error, near = out
    A, B = dots.shape
    row, square, inverse = items.row, items.square, items.inverse
    for i in range(A):
        own, q_square, q_inverse = queries.row[i], queries.square[i], queries.inverse[i]
        for j in range(B):
            size = q_square + square[j]
            cos[i, j] = 2 - 2 * dots[i, j] * q_inverse * inverse[j]
            cos_error[i, j] = 2 * cos_unit
            l2[i, j] = size - 2 * dots[i, j]
            l2_error[i, j] = l2_unit * size + 1e-290 * (l2_unit > 0)
            open_ = (q_inverse == 0) | (inverse[j] == 0)
            open_ |= cos_error[i, j] > limit * cos[i, j]
            near[i, j] = open_ | (l2_error[i, j] > limit * l2[i, j])
        for j in range(B):
            if row[j] == own:
                cos[i, j] = l2[i, j] = np.inf
                near[i, j] = False


@compiled
def count_float64(product, first, queries, gallery, slack, counts, ties, pairs):
    """Count by squared distances in float64, for rows of the product from `first` on.

    slack: error per squared length, per length, and constant. Counts and ties are added up, open
    pairs are listed. Returns (row to continue with, pairs listed); all rows are done at row A.
    """
    A, B = product.shape
    found = 0
    for i in range(first, A):
        if pairs.shape[0] - found < B:
            return i, found
        root = np.sqrt(queries.squares[i])
        for j in range(B):
            if j == queries.self_columns[i]:
                continue
            w = queries.squares[i] + gallery.squares[j]
            d = w - 2.0 * product[i, j]
            err = slack[0] * w + slack[1] * (root + np.sqrt(gallery.squares[j])) + slack[2]
            if d + err < queries.limits[0, i]:
                counts[i] += 1
            elif not (d - err > queries.limits[1, i]) and queries.codes[i] != gallery.codes[j]:
                if queries.groups[i] == gallery.groups[j] or queries.groups[i] == ANY:
                    counts[i] += 1
                    ties[i] += 1
                else:
                    pairs[found, 0] = i
                    pairs[found, 1] = j
                    found += 1
    return A, found


@compiled
def pair_distances(queries, gallery, out):
    """Measure pairs in float64: the squared distances of their rows, scaled, by differences.

    Scaled to length 1, that is the squared chord |q/|q| - x/|x||^2 = 2 - 2 cos, which keeps its
    digits where 1 - cos has lost them. The cosine of a zero row is 0.
    """
    for n in range(len(queries.row)):
        query, item = queries.vectors[queries.row[n]], gallery.vectors[gallery.row[n]]
        a, b = queries.scale[n], gallery.scale[n]
        squared = 0.0
        for k in range(len(query)):
            difference = np.float64(query[k]) * a - np.float64(item[k]) * b
            squared += difference * difference
        out[n] = squared if a > 0.0 and b > 0.0 else 2.0
