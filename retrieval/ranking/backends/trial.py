"""Check that a device multiplies in float32, within the error that the margins allow."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from retrieval.problem import from_arrays
from retrieval.ranking.backends.products import ieee_products, multiply
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import ULP32, prepare

_SHAPES = ((512, 512), (333, 65))  # queries and items of the trial products
_DIMS = (64, 500)  # tried beside the dimension at hand


def cuda_devices() -> tuple[str, ...]:
    """The GPUs that torch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(f"cuda:{n}" for n in range(count))


def title(device: str) -> str:
    """The model of a GPU."""
    return torch.cuda.get_device_name(device)


@cache
def fault_of(device: str, dim: int) -> str | None:
    """Why a device cannot count ranks of vectors of this dimension; None if it can."""
    try:
        with ieee_products(), torch.autocast(torch.device(device).type, enabled=False):
            for D in dict.fromkeys((dim, *_DIMS)):
                excess = np.max([_excess(device, D, *shape) for shape in _SHAPES])
                if not excess <= 1:
                    return (
                        f"a trial product of {D} dimensions is off by {excess:.3g} times the "
                        "error that float32 allows"
                    )
        return None if _counts_alike(device) else "a trial count differs from that of the CPU"
    except Exception as error:  # no memory, an unknown architecture, a driver that fails
        return f"a trial fails: {str(error).splitlines()[0].rstrip('.')}"


def _excess(device: str, dim: int, queries: int, items: int) -> float:
    """The largest error of a product, in multiples of the bound D 2^-24 sum |x_k y_k|."""
    rng = np.random.default_rng(dim)
    worst = np.float64(0)
    for a, b in zip(_rows(rng, queries, dim), _rows(rng, items, dim), strict=True):
        tensors = (torch.from_numpy(rows).to(device) for rows in (a, b))
        found = multiply(*tensors).cpu().numpy().astype(np.float64)
        a, b = a.astype(np.float64), b.astype(np.float64)
        bound = (dim + 2) * ULP32 * (np.abs(a) @ np.abs(b).T) + 2.0**-100
        worst = np.maximum(worst, (np.abs(found - a @ b.T) / bound).max())  # NaN stays
    return float(worst)


def _counts_alike(device: str) -> bool:
    """Whether a device counts the ranks and positions of a small problem as the CPU does."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 20, 300)
    vectors = rng.integers(-3, 4, (300, 4)).astype(np.float32) + 0.1 * rng.random((300, 1))
    found = []
    for devices in ((), (device,)):
        prepared = prepare(from_arrays(vectors, labels), ("l2", "cos"), 1 << 26, 1)
        counter = TileCounter(prepared, True, block=128, devices=devices)
        counter.count(None)
        for d in prepared.distances:
            positions = counter.positions[d].result().positions
            found.append((counter.counts[d], counter.ties[d], positions))
    ours, theirs = found[:2], found[2:]
    return all(
        np.array_equal(a, b)
        for one, two in zip(ours, theirs, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def _rows(rng: np.random.Generator, count: int, dim: int) -> list[np.ndarray]:
    """Rows (count, dim) that are no longer than 1, of several kinds.

    Random ones; equal entries whose low bits TF32 and bfloat16 drop, all in one direction; the
    same with signs that cancel; and entries of very different sizes.
    """
    random = rng.standard_normal((count, dim))
    random /= np.linalg.norm(random, axis=1, keepdims=True)
    bits = 1 + 2.0 ** -rng.integers(9, 24, (count, 1)) - 2.0**-12
    low = np.repeat(bits, dim, axis=1) * 2.0 ** -np.ceil(np.log2(dim) / 2 + 1)
    signs = np.where(np.arange(dim) % 2, 1.0, -1.0) * np.sign(random[:, :1])
    sizes = random * 2.0 ** -rng.integers(0, 30, (count, dim))
    return [rows.astype(np.float32) for rows in (random, low, low * signs, sizes)]
