"""Rung 1: y[t, n] = sum_k x[t, k] * w[n, k], a thread an output.

x float32 [T, K], w [N, K], scale float32 [N] (int8), y float32 [T, N], all in global memory; 2*T*N*K operations.
Reads w T times, and badly: at one moment the 32 lanes of a warp read 32 rows, so 32 cache lines for 32 numbers. What a line
brings besides is used in the next steps, if it is still in L1 then. Predicted: a small part of bandwidth.

    thread n of blocks (., t) -> y[t, n]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels.carrier import DTYPES, F32_1D, F32_2D, array_type, loader
from l1_kernels.cuda_api import cuda

ZERO, ONE = np.float32(0), np.float32(1)
THREADS = 128


@cache
def make_naive(dtype: str) -> Callable[..., Any]:
    """kernel(x, w, scale, y)[(N / THREADS, T), THREADS], the quotient rounded up."""
    load, scaled = loader(dtype), dtype == "int8"

    @cuda.jit
    def naive(x, w, scale, y):
        n, t = cuda.grid(1), cuda.blockIdx.y
        if n < w.shape[0]:
            total = ZERO
            for k in range(w.shape[1]):
                total += x[t, k] * load(w[n, k])
            y[t, n] = total * scale[n] if scaled else total

    return naive


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in DTYPES:
        yield f"naive_{dtype}", make_naive(dtype), (F32_2D, array_type(dtype, 2), F32_1D, F32_2D)
