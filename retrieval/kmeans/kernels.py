"""Compiled loops of k-means and AMI. All release the GIL, so every thread works on its own rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from retrieval.resources import compiled

TIE = np.float32(1e-6)  # of |x|^2: squared distances that differ by less are measured again
EQUAL = 1e-8  # of |x|^2: in float64, distances that differ by less are equal, the point stays
WIDTH = 1024  # points whose sums are changed at a time: those of 100 clusters take 400 kB
ORDERED = {"nnan", "nsz", "contract", "reassoc"}  # no NaN: a minimum may use vector registers


class Vectors(NamedTuple):
    """Points or centroids with their squared lengths."""

    rows: np.ndarray  # (n, D) float32
    norms: np.ndarray  # (n,)


class State(NamedTuple):
    """The points of `lloyd.Clusters`, their centroids, and what is known of their distances."""

    points: np.ndarray  # (N, D) float32
    norms: np.ndarray  # (N,) squared lengths
    centroids: np.ndarray  # (k, D)
    label: np.ndarray  # (N,) int32, the cluster of each point
    own: np.ndarray  # (N,) squared distance to its own centroid
    other: np.ndarray  # (N,) at most that to any other centroid


class Nearest(NamedTuple):
    """The two nearest centroids of some points, their own ones left out."""

    distances: np.ndarray  # (2, A) |c|^2 - 2 x c
    which: np.ndarray  # (A,) int32, the nearest, -1: none


@compiled(fastmath=ORDERED)
def inner(a, b):
    """The product of two vectors."""
    total = np.float32(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@compiled(fastmath=ORDERED)
def fold(bounds, centroids, columns, rows, limits, state, nearest):
    """Find the nearest centroids of these rows among those of a tile, whose numbers are `columns`.

    `bounds` are the products x c, with limits of -inf, or upper bounds of them. Then a product is
    computed only if its bound allows that the centroid is the nearest, and nearer than the limit.
    Otherwise its bound stands for it: too near, but no nearer than the limit.
    """
    A, B = bounds.shape
    norms = centroids.norms
    for i in range(A):
        own = state.label[rows[i]]
        first, second = nearest.distances[0, i], nearest.distances[1, i]
        for begin in range(0, B, 32):
            end = min(begin + 32, B)
            least = np.float32(np.inf)
            for j in range(begin, end):
                value = norms[j] - np.float32(2) * bounds[i, j]
                least = value if value < least else least
            if least < second:
                for j in range(begin, end):
                    value = norms[j] - np.float32(2) * bounds[i, j]
                    if value < second and columns[j] != own:
                        if value < min(first, limits[i]):
                            product = inner(state.points[rows[i]], centroids.rows[j])
                            value = norms[j] - np.float32(2) * product
                        if value < first:
                            second, first = first, value
                            nearest.which[i] = columns[j]
                        elif value < second:
                            second = value
        nearest.distances[0, i], nearest.distances[1, i] = first, second


@compiled
def settle(rows, state, nearest):
    """Assign points to nearer centroids, and lower their bounds for all others.

    float64 decides between distances that float32 may round either way: one point in another
    cluster leads to other centroids, and after some iterations to another objective.
    """
    points, norms, centroids, label, own, other = state
    distances, which = nearest
    for i in range(len(rows)):
        row = rows[i]
        first = max(np.float32(0), distances[0, i] + norms[row])
        second = max(np.float32(0), distances[1, i] + norms[row])
        nearer = which[i] >= 0 and first < own[row]
        if which[i] >= 0 and abs(first - own[row]) <= TIE * norms[row]:
            gained = 0.0
            for d in range(points.shape[1]):
                new = np.float64(points[row, d]) - centroids[which[i], d]
                old = np.float64(points[row, d]) - centroids[label[row], d]
                gained += old * old - new * new
            nearer = gained > EQUAL * norms[row]
        if nearer:
            other[row] = min(other[row], own[row], second)
            own[row], label[row] = first, which[i]
        else:
            other[row] = min(other[row], first)


@compiled
def measure(rows, state):
    """Compute the squared distances of points to their own centroids."""
    for row in rows:
        point, centroid = state.points[row], state.centroids[state.label[row]]
        square, product = np.float32(0), np.float32(0)
        for d in range(len(point)):
            square += centroid[d] * centroid[d]
            product += centroid[d] * point[d]
        state.own[row] = max(np.float32(0), square - np.float32(2) * product + state.norms[row])


@compiled
def transfer(points, rows, before, after, sums, counts, touched):
    """Move points from the sums of their former clusters to those of their new ones."""
    for row in rows:
        old, new = before[row], after[row]
        if old >= 0:
            counts[old] -= 1
            touched[old] = True
            for d in range(points.shape[1]):
                sums[old, d] -= points[row, d]
        counts[new] += 1
        touched[new] = True
        for d in range(points.shape[1]):
            sums[new, d] += points[row, d]


@compiled
def squared_distances(product, norms, others, out, start):
    """Write |a|^2 - 2 a b + |b|^2 into columns of `out`, from `start` on."""
    for c in range(len(product)):
        for i in range(product.shape[1]):
            squared = norms[c] - np.float32(2) * product[c, i] + others[i]
            out[c, start + i] = max(np.float32(0), squared)


@compiled(fastmath=ORDERED)
def count_below(products, rows, columns, limits):
    """How many of row - 2 product + column are below the limits of their columns."""
    total = 0
    for i in range(len(products)):
        found = np.int32(0)
        for j in range(products.shape[1]):
            found += np.int32(rows[i] - np.float32(2) * products[i, j] + columns[j] < limits[j])
        total += int(found)
    return total


@compiled
def bounded_distances(bounds, drawn, points, own, out, start):
    """Compute the same as `squared_distances`, from upper bounds of the products.

    A distance that is at least `own` of its point is only a lower bound, but at least `own` too.
    """
    for c in range(len(bounds)):
        for i in range(bounds.shape[1]):
            squared = drawn.norms[c] - np.float32(2) * bounds[c, i] + points.norms[i]
            if squared < own[i]:
                product = inner(drawn.rows[c], points.rows[i])
                squared = drawn.norms[c] - np.float32(2) * product + points.norms[i]
            out[c, start + i] = max(np.float32(0), squared)


@compiled(fastmath=ORDERED)
def gain(distances, own):
    """By how much the sum of distances falls with a centroid at these distances."""
    total = 0.0
    for begin in range(0, len(own), 4096):
        part = np.float32(0)
        for i in range(begin, min(begin + 4096, len(own))):
            part += max(np.float32(0), own[i] - distances[i])
        total += np.float64(part)
    return total


@compiled
def keep_best(distances, bounds, done, wanted, state):
    """Choose candidates one by one, each time the one that gains most.

    A gain that was computed before the last choice is an upper bound of what it is now.
    """
    label, own, other = state.label, state.own, state.other
    chosen = np.empty(wanted, np.int64)
    computed = np.zeros(len(bounds), np.int64)
    for n in range(wanted):
        best = np.argmax(bounds)
        while computed[best] < n:
            bounds[best] = gain(distances[best], own)
            computed[best] = n
            best = np.argmax(bounds)
        chosen[n] = best
        bounds[best] = -1.0
        for i in range(len(own)):
            squared = distances[best, i]
            if squared < own[i]:
                other[i], own[i], label[i] = own[i], squared, done + n
            elif squared < other[i]:
                other[i] = squared
    return chosen


# k-means from the distances of all pairs of points: see pairs.py.


@compiled
def choose_by_pairs(pairs, first, draws, label, own):
    """Choose centroids by greedy k-means++ among points drawn with numbers from 0 to 1."""
    N = len(pairs)
    own[:] = pairs[first]
    for done in range(len(draws)):
        sums = np.cumsum(own.astype(np.float64))
        best, most = 0, -1.0
        for draw in draws[done]:
            row = min(np.searchsorted(sums, draw * sums[-1], side="right"), N - 1)
            gained = gain(pairs[row], own)
            if gained > most:
                best, most = row, gained
        for i in range(N):
            if pairs[best, i] < own[i]:
                own[i], label[i] = pairs[best, i], done + 1


@compiled
def add(total, row, times):
    for i in range(len(total)):
        total[i] += times * row[i]


@compiled
def transfer_sums(pairs, rows, before, after, sums):
    """Move points from the sums of their former clusters to those of their new ones."""
    for begin in range(0, len(pairs), WIDTH):
        end = begin + WIDTH
        for row in rows:
            add(sums[after[row], begin:end], pairs[row, begin:end], np.float32(1))
            add(sums[before[row], begin:end], pairs[row, begin:end], np.float32(-1))


@compiled(fastmath=ORDERED)
def lower(least, total, scale, shift):
    """Keep the smaller of `least` and the distances to one more centroid."""
    for i in range(len(least)):
        value = total[i] * scale - shift
        least[i] = value if value < least[i] else least[i]


@compiled
def assign_by_sums(sums, norms, label, own):
    """Assign points to their nearest centroids; a tie changes nothing."""
    k, N = sums.shape
    inside, sizes = np.zeros(k), np.zeros(k)
    for i in range(N):
        inside[label[i]] += sums[label[i], i]
        sizes[label[i]] += 1
    scale = (1 / sizes).astype(np.float32)
    shift = (inside / (2 * sizes * sizes)).astype(np.float32)
    for begin in range(0, N, WIDTH):
        least = np.full(min(WIDTH, N - begin), np.inf, np.float32)
        for c in range(k):
            lower(least, sums[c, begin : begin + WIDTH], scale[c], shift[c])
        for i in range(begin, begin + len(least)):
            nearest = sums[label[i], i] * scale[label[i]] - shift[label[i]]
            if least[i - begin] + TIE * norms[i] < nearest:
                for c in range(k):
                    value = sums[c, i] * scale[c] - shift[c]
                    if value < nearest:
                        nearest, label[i] = value, c
            own[i] = max(np.float32(0), nearest)


@compiled(fastmath=False)  # sums in one order: the same on every processor
def information_by_chance(A, repeats_A, B, repeats_B, log_factorials):
    """The mean mutual information of all ways to form groups of sizes A and others of sizes B.

    Two groups add a number that depends on their sizes only. It is computed once for each pair of
    sizes, which are few even among thousands of clusters.
    """
    N = len(log_factorials) - 1
    total = 0.0
    for i, a in enumerate(A):
        for j, b in enumerate(B):
            ways = log_factorials[a] + log_factorials[N - a] - log_factorials[N]
            ways += log_factorials[b] + log_factorials[N - b]
            for both in range(max(1, a + b - N), min(a, b) + 1):  # items that the two share
                apart = log_factorials[a - both] + log_factorials[b - both]
                apart += log_factorials[both] + log_factorials[N - a - b + both]
                information = both / N * math.log(N * (both / (a * b)))
                total += repeats_A[i] * repeats_B[j] * information * math.exp(ways - apart)
    return total
