"""y[t, n] = scale[n] * sum_k x[t, k] * w[n, k] + b[n]

x float32 [T, K], w [N, K] of 4, 2 or 1 bytes a number (scale float32 [N] for int8), b float32 [N], y float32 [T, N]: all in
global memory. Where w is 16-bit, x is rounded to its dtype first; the sum is float32. 2*T*N*K operations.

    skinny   T <= 16: reads w once for each `tokens` rows of x: bound by w's bytes.
             warp -> output n and `tokens` rows of x; lane l takes k = l, l + 32, ... (coalesced in w and in x)
    tiled    T > 16 where cuBLAS is not (int8, the simulator): 16 x 16 outputs a block, w and x by 16 x 16 tiles through
             shared memory, 8 operations a byte read: bound by operations, far from the card's (cublas.py is near).

The launcher rejects: x whose K is not w's, a bias that is not float32 [N], a weight whose data is not its dtype's carrier.
T = 0 or N = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups
from l1_kernels.carrier import DTYPES, F32_1D, F32_2D, array_type, loader, rounder
from l1_kernels.cuda_api import cuda

ZERO, ONE = np.float32(0), np.float32(1)
SKINNY_TOKENS = 16  # the largest T for the skinny kernel
WARPS = 4  # a block of the skinny kernel
TILE = 16
PITCH = TILE + 1  # a column of a tile then lies in 16 different banks
TILE_SIZE = TILE * PITCH
reduce_sum, lane_index, warp_index = groups.reduce_sum, groups.lane, groups.warp


@cache
def make_skinny(dtype: str, tokens: int) -> Callable[..., Any]:
    """kernel(x, w, scale, bias, has_bias, y)[(N / WARPS, T / tokens), WARPS * 32], quotients rounded up."""
    load, round_x, scaled = loader(dtype), rounder(dtype), dtype == "int8"

    @cuda.jit
    def skinny(x, w, scale, bias, has_bias, y):
        n = cuda.blockIdx.x * WARPS + warp_index()
        t0 = cuda.blockIdx.y * tokens
        last = x.shape[0] - 1
        if n < w.shape[0]:  # the same for all lanes of a warp
            sums = cuda.local.array(tokens, types.float32)
            for i in range(tokens):
                sums[i] = ZERO
            for k in range(lane_index(), w.shape[1], 32):
                number = load(w[n, k])
                for i in range(tokens):  # rows past the last read it again, and are not written
                    sums[i] += number * round_x(x[min(t0 + i, last), k])
            factor = scale[n] if scaled else ONE
            shift = bias[n] if has_bias else ZERO
            for i in range(tokens):
                whole = reduce_sum(sums[i])
                if lane_index() == 0 and t0 + i <= last:
                    y[t0 + i, n] = whole * factor + shift

    return skinny


@cache
def make_tiled(dtype: str) -> Callable[..., Any]:
    """kernel(x, w, scale, bias, has_bias, y)[(N / TILE, T / TILE), (TILE, TILE)], quotients rounded up."""
    load, round_x, scaled = loader(dtype), rounder(dtype), dtype == "int8"

    @cuda.jit
    def tiled(x, w, scale, bias, has_bias, y):
        x_tile = cuda.shared.array(TILE_SIZE, types.float32)
        w_tile = cuda.shared.array(TILE_SIZE, types.float32)
        column, row = cuda.threadIdx.x, cuda.threadIdx.y
        n0, t0 = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        total = ZERO
        for k0 in range(0, w.shape[1], TILE):
            k = k0 + column
            inside = k < w.shape[1]
            here = row * PITCH + column
            x_tile[here] = round_x(x[t0 + row, k]) if inside and t0 + row < x.shape[0] else ZERO
            w_tile[here] = load(w[n0 + row, k]) if inside and n0 + row < w.shape[0] else ZERO
            cuda.syncthreads()
            for i in range(TILE):
                total += x_tile[row * PITCH + i] * w_tile[column * PITCH + i]
            cuda.syncthreads()
        t, n = t0 + row, n0 + column
        if t < x.shape[0] and n < w.shape[0]:
            factor = scale[n] if scaled else ONE
            shift = bias[n] if has_bias else ZERO
            y[t, n] = total * factor + shift

    return tiled


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in DTYPES:
        signature = (F32_2D, array_type(dtype, 2), F32_1D, F32_1D, types.boolean, F32_2D)
        for tokens in (1, 4):
            yield f"linear_skinny_{dtype}_{tokens}", make_skinny(dtype, tokens), signature
        yield f"linear_tiled_{dtype}", make_tiled(dtype), signature
