"""Compiled loops over rows against NumPy, for every float16 there is."""

import numpy as np

from retrieval.rows import kernels as row_kernels
from retrieval.rows.scan import scan, units


def test_every_float16_is_widened_exactly():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    found = units(every, np.ones(256))
    np.testing.assert_array_equal(found, every.astype(np.float32))
    assert np.array_equal(np.signbit(found), np.signbit(every))
    finite = np.isfinite(every.astype(np.float64)).all(axis=1)
    np.testing.assert_array_equal(np.isfinite(scan(every).square), finite)


def test_rows_are_widened_without_compiled_loops_too():
    for row in (np.float16([1.5, -2.0, 6e-8, np.inf]), np.float32([1.5, -2.0]), np.int8([3, -4])):
        out = np.empty(len(row), np.float32)
        row_kernels._widen(row.view(np.uint16) if row.dtype == np.float16 else row, out)
        assert (out == row.astype(np.float32)).all()
