"""Rung 2: y[t, n] = sum_k x[t, k] * w[n, k], a warp an output: lanes are neighbours along k.

Arguments and operations as in naive.py. A warp's 32 lanes read 32 neighbours: with 16-bit weights 64 bytes, half a cache
line, by one load in flight; the sum over the lanes costs five shuffles a row and no barrier. Reads w once for each token.
Predicted: coalesced, but two bytes a lane and load is far too little in flight.

    warp -> y[t, n];  lane l -> k = l, l + 32, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups
from l1_kernels.carrier import DTYPES, F32_1D, F32_2D, array_type, loader
from l1_kernels.cuda_api import cuda

ZERO, ONE = np.float32(0), np.float32(1)
WARPS = 4  # a block
reduce_sum, lane_index, warp_index = groups.reduce_sum, groups.lane, groups.warp


@cache
def make_coalesced(dtype: str) -> Callable[..., Any]:
    """kernel(x, w, scale, y)[(N / WARPS, T), 32 * WARPS], the quotient rounded up."""
    load, scaled = loader(dtype), dtype == "int8"

    @cuda.jit
    def coalesced(x, w, scale, y):
        n, t = cuda.blockIdx.x * WARPS + warp_index(), cuda.blockIdx.y
        if n < w.shape[0]:
            total = ZERO
            for k in range(lane_index(), w.shape[1], 32):
                total += x[t, k] * load(w[n, k])
            total = reduce_sum(total)
            if lane_index() == 0:
                y[t, n] = total * scale[n] if scaled else total

    return coalesced


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in DTYPES:
        yield f"coalesced_{dtype}", make_coalesced(dtype), (F32_2D, array_type(dtype, 2), F32_1D, F32_2D)
