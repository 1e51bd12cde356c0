"""quantize/reference.py for the CPU, which multiplies in float32: what is left of x, not its int8.

A row at a time, while it lies in the L1 cache; serial, as a norm is. The sweeps vectorise: they have no branches.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from l1_kernels.quantize.reference import LARGEST, OUTLIER, ROUNDS, STEP, TRIM

SUMS = {"reassoc", "contract", "nsz"}  # sums may be reordered, NaN and infinity keep their meaning
_TRIM, _OUTLIER, _LARGEST, _STEP = np.float32(TRIM), np.float32(OUTLIER), np.float32(LARGEST), np.float32(STEP)
_REACH, _LARGEST_FLOAT = np.float32(LARGEST * STEP), np.float32(3.4028235e38)


def rounded(x: np.ndarray, y: np.ndarray) -> None:
    """x [T, K] float32 -> y: scale * (low + 128 high)."""
    _rounded(x, y)


@njit(fastmath=SUMS, cache=True)
def _mean_within(row, limit):
    total, count = np.float32(0), np.float32(0)
    for k in range(row.size):
        size = abs(row[k])
        inside = np.float32(1) if size <= limit else np.float32(0)
        total += size * inside
        count += inside
    return total / max(count, np.float32(1))


@njit(fastmath=SUMS, cache=True)
def _rounded(x, y):
    num_tokens, width = x.shape
    for t in range(num_tokens):
        row = x[t]
        total = np.float32(0)
        for k in range(width):
            total += abs(row[k])
        if not total <= _LARGEST_FLOAT:  # NaN or infinity among them
            y[t] = np.nan
            continue
        mean = total / np.float32(width)
        for _ in range(ROUNDS):
            mean = _mean_within(row, _TRIM * mean)
        limit = _OUTLIER * mean
        top, inner = np.float32(0), np.float32(0)
        for k in range(width):
            size = abs(row[k])
            top = max(top, size)
            inner = max(inner, size if size <= limit else np.float32(0))
        scale = max(inner / _LARGEST, top / _REACH)
        if scale == 0:
            scale = np.float32(1)
        for k in range(width):
            part = row[k] / scale
            high = np.rint(part / _STEP) if abs(row[k]) > limit else np.float32(0)
            y[t, k] = scale * (np.rint(part - _STEP * high) + _STEP * high)
