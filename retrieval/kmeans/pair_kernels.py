"""Compiled loops of k-means from the distances of all pairs of points: see pairs.py."""

from __future__ import annotations

import numpy as np

from retrieval.kmeans.kernels import ORDERED, TIE, gain
from retrieval.resources import compiled

WIDTH = 1024  # points whose sums are changed at a time: those of 100 clusters take 400 kB


@compiled
def choose(pairs, first, draws, label, own):
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
def add(total, row):
    for i in range(len(total)):
        total[i] += row[i]


@compiled
def subtract(total, row):
    for i in range(len(total)):
        total[i] -= row[i]


@compiled
def transfer(pairs, rows, before, after, sums):
    """Move points from the sums of their former clusters to those of their new ones."""
    for begin in range(0, len(pairs), WIDTH):
        end = begin + WIDTH
        for row in rows:
            add(sums[after[row], begin:end], pairs[row, begin:end])
            subtract(sums[before[row], begin:end], pairs[row, begin:end])


@compiled(fastmath=ORDERED)
def lower(least, total, scale, shift):
    """Keep the smaller of `least` and the distances to one more centroid."""
    for i in range(len(least)):
        value = total[i] * scale - shift
        least[i] = value if value < least[i] else least[i]


@compiled
def assign(sums, norms, label, own):
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
