"""Decode LZF, h5py's fast compression, with every bound checked."""

from __future__ import annotations

import numpy as np

from retrieval.resources import compiled


def inflate(data: bytes, limit: int) -> bytes:
    """The decompressed bytes; ValueError if they are damaged or more than `limit`."""
    out = np.empty(limit, np.uint8)
    size = _inflate(np.frombuffer(data, np.uint8), out)
    if size < 0:
        raise ValueError("LZF data that are damaged, or longer than a chunk")
    return out[:size].tobytes()


@compiled
def _inflate(data, out):
    """Bytes written to `out`, or -1."""
    at = np.int64(0)
    to = np.int64(0)
    while at < len(data):
        control = np.int64(data[at])
        at += 1
        if control < 32:  # that many bytes as they are, and one
            size = control + 1
            if at + size > len(data) or to + size > len(out):
                return -1
            for n in range(size):
                out[to + n] = data[at + n]
            at += size
        else:  # a repetition of what was written before
            size = (control >> 5) + 2
            if size == 9:
                if at >= len(data):
                    return -1
                size += np.int64(data[at])
                at += 1
            if at >= len(data):
                return -1
            back = to - ((control & 31) << 8) - np.int64(data[at]) - 1
            at += 1
            if back < 0 or to + size > len(out):
                return -1
            for n in range(size):
                out[to + n] = out[back + n]
        to += size
    return to
