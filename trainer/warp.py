"""One affine resampling. Pillow's takes ten times as long on small images."""

from __future__ import annotations

import numpy as np

from retrieval.kernels import compiled


@compiled(fastmath=False)  # the same bits wherever it is compiled
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
            p, q = np.float32(u - left), np.float32(v - top)
            right, bottom = min(left + 1, W - 1), min(top + 1, H - 1)
            left, top = max(left, 0), max(top, 0)
            for k in range(3):
                above = image[top, left, k] * (1 - p) + image[top, right, k] * p
                under = image[bottom, left, k] * (1 - p) + image[bottom, right, k] * p
                out[y, x, k] = np.uint8(above * (1 - q) + under * q + np.float32(0.5))
