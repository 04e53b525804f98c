"""Resample (H, W, 3) uint8 images with compiled loops.

`resample` is Pillow's antialiased resize, rows first and then columns, to the bit. (From version 13
on Pillow itself begins with the columns of some images.) It computes only the requested
window: half of the work where a crop follows. `warp` is one affine change; on small images
Pillow's takes several times as long.
"""

import numpy as np

from retrieval.resources import compiled

_BITS = 22  # of the fractions of weights, as in Pillow
_HALF = 1 << (_BITS - 1)
BILINEAR, BICUBIC, LANCZOS, BOX, NEAREST = range(5)  # in the order of config.INTERPOLATIONS
_SUPPORTS = (1.0, 2.0, 3.0, 0.5)  # how far a filter reaches, in pixels of the smaller image


# fastmath would let the same pixels differ by where they were compiled.
@compiled(fastmath=False)
def resample(image, width, height, left, top, kind, out):
    """out (h, w, 3): the window at left, top of the image resized to width x height."""
    H, W = image.shape[0], image.shape[1]
    h, w = out.shape[0], out.shape[1]
    columns = _weights(W, width, left, w, kind)
    if height == H:
        _across(image, top, top + h, columns, out)
        return
    rows = _weights(H, height, top, h, kind)
    first, last = rows[0][0], rows[0][h - 1] + rows[1][h - 1]
    if width == W:
        between = image[first:last, left : left + w].copy()
    else:
        between = np.empty((last - first, w, 3), np.uint8)
        _across(image, first, last, columns, between)
    _down(between, first, rows, out)


@compiled(fastmath=False)
def _weights(size, resized, first, count, kind):
    """For each of `count` places: the first pixel that counts, how many do, and their weights."""
    scale = size / resized
    if kind == NEAREST:
        return _nearest(scale, first, count)
    stretch = max(scale, 1.0)  # shrinking widens the filter: antialiasing
    support = _SUPPORTS[kind] * stretch
    most = int(np.ceil(support)) * 2 + 1
    begin, length = np.empty(count, np.int64), np.empty(count, np.int64)
    weights, exact = np.zeros((count, most), np.int32), np.empty(most)
    for place in range(count):
        centre = (first + place + 0.5) * scale
        low = max(int(centre - support + 0.5), 0)
        n = min(int(centre + support + 0.5), size) - low
        total = 0.0
        for j in range(n):
            exact[j] = _filter((j + low - centre + 0.5) * (1.0 / stretch), kind)
            total += exact[j]
        for j in range(n):
            w = exact[j] / total * (1 << _BITS)
            weights[place, j] = int(w - 0.5) if w < 0 else int(w + 0.5)
        begin[place], length[place] = low, n
    return begin, length, weights


@compiled(fastmath=False)
def _nearest(scale, first, count):
    """The one pixel that the centre of each place lies in; steps add up as in Pillow."""
    begin, at = np.empty(count, np.int64), 0.5 * scale
    for place in range(first + count):
        if place >= first:
            begin[place - first] = int(at)
        at += scale
    return begin, np.ones(count, np.int64), np.full((count, 1), 1 << _BITS, np.int32)


@compiled(fastmath=False)
def _filter(x, kind):
    if kind == BOX:
        return 1.0 if -0.5 < x <= 0.5 else 0.0
    x = abs(x)
    if kind == BILINEAR:
        return 1.0 - x if x < 1.0 else 0.0
    if kind == LANCZOS:
        return _sinc(x) * _sinc(x / 3.0) if x < 3.0 else 0.0
    a = -0.5
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    if x < 2.0:
        return (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return 0.0


@compiled(fastmath=False)
def _sinc(x):
    return 1.0 if x == 0.0 else np.sin(x * np.pi) / (x * np.pi)


@compiled(fastmath=False)
def _across(image, first, last, columns, out):
    """Rows first .. last-1, each resized along its length."""
    begin, length, weights = columns
    for y in range(first, last):
        row, to = image[y], out[y - first]
        for x in range(out.shape[1]):
            r = g = b = np.int32(_HALF)
            start = begin[x]
            for j in range(length[x]):
                w = weights[x, j]
                r = np.int32(r + w * np.int32(row[start + j, 0]))
                g = np.int32(g + w * np.int32(row[start + j, 1]))
                b = np.int32(b + w * np.int32(row[start + j, 2]))
            to[x, 0], to[x, 1], to[x, 2] = _byte(r), _byte(g), _byte(b)


@compiled(fastmath=False)
def _down(image, first, rows, out):
    """Columns of an image whose row 0 is number `first`."""
    begin, length, weights = rows
    n = out.shape[1] * 3
    source, target = image.reshape(len(image), n), out.reshape(len(out), n)
    sums = np.empty(n, np.int32)
    for y in range(len(out)):
        sums[:] = _HALF
        for j in range(length[y]):
            w, row = weights[y, j], source[begin[y] - first + j]
            for i in range(n):  # vectorised
                sums[i] = np.int32(sums[i] + w * np.int32(row[i]))
        to = target[y]
        for i in range(n):
            to[i] = _byte(sums[i])


@compiled(fastmath=False)
def _byte(total):
    return np.uint8(min(max(total >> _BITS, 0), 255))


@compiled(fastmath=False)
def warp(image, matrix, fill, out):
    """out[y, x] = image at (ax + by + c, dx + ey + f) of pixel centres, bilinear.

    As Pillow's transform: a point beyond the image has the colour `fill`, and within half a pixel
    of its edge the colour of the edge.
    """
    H, W = image.shape[0], image.shape[1]
    a, b, c, d, e, f = matrix
    for y in range(out.shape[0]):
        for x in range(out.shape[1]):
            u = a * (x + 0.5) + b * (y + 0.5) + c
            v = d * (x + 0.5) + e * (y + 0.5) + f
            if not (0.0 <= u < W and 0.0 <= v < H):
                for k in range(3):
                    out[y, x, k] = fill[k]
                continue
            u -= 0.5
            v -= 0.5
            left, top = int(np.floor(u)), int(np.floor(v))
            p, q = u - left, v - top
            right, bottom = min(left + 1, W - 1), min(top + 1, H - 1)
            left, top = max(left, 0), max(top, 0)
            for k in range(3):
                above = image[top, left, k] * (1 - p) + image[top, right, k] * p
                under = image[bottom, left, k] * (1 - p) + image[bottom, right, k] * p
                out[y, x, k] = np.uint8(above * (1 - q) + under * q + 0.5)
