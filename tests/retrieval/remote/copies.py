"""The bytes of a file to download, and the end of a process that uses its copy."""

import io
import os

import numpy as np

from retrieval.remote import cache_limit


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def forget_use():
    """As if the process that used the copies had ended."""
    for descriptor in cache_limit._held.values():
        os.close(descriptor)
    cache_limit._held.clear()
