"""Rung 5, the paper's two kernels for small outputs: blocks share the input dimension too, a second kernel adds.

Where N / 32 tiles are fewer than multiprocessors, tiles along the output leave part of the GPU idle. Kernel one:
partial[s, t, n] = the sum over split s's part of k, by transpose.py's reduction; kernel two: y = sum_s partial.
Costs 8*SPLITS*T*N bytes (L2) and one more launch, some 2 us: worth it only where a launch is short of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from numba import types

from l1_kernels import groups
from l1_kernels.carrier import F32_1D, F32_2D, F32_3D
from l1_kernels.cuda_api import cuda
from l1_kernels.sbi_gemm.layout import FULL_LINE, ZERO, make_share, packed_type
from l1_kernels.sbi_gemm.transpose import make_reduce

lane_index, warp_index = groups.lane, groups.warp
THREADS = 128


@cache
def make_partial(dtype: str, m: int, warps: int) -> Callable[..., Any]:
    """kernel(x, packed, partial [SPLITS, T, N])[(N / 32, T, SPLITS), 32 * warps], the quotient rounded up."""
    share, reduce = make_share(dtype, m), make_reduce(warps)

    @cuda.jit
    def partial_sums(x, packed, partial):
        lane, warp, t, split = lane_index(), warp_index(), cuda.blockIdx.y, cuda.blockIdx.z
        n = cuda.blockIdx.x * 32 + lane
        inside = n < partial.shape[2]
        steps = (x.shape[1] + m - 1) // m
        each = (steps + partial.shape[0] - 1) // partial.shape[0]
        total = ZERO
        if inside:
            total = share(x, t, packed, partial.shape[2], n, split * each + warp, min(steps, (split + 1) * each), warps)
        total = reduce(total)
        if warp == 0 and inside:
            partial[split, t, n] = total

    return partial_sums


@cache
def make_sum(dtype: str) -> Callable[..., Any]:
    """kernel(partial, scale, y)[(N / THREADS, T), THREADS], the quotient rounded up."""
    scaled = dtype == "int8"

    @cuda.jit
    def sum_splits(partial, scale, y):
        n, t = cuda.grid(1), cuda.blockIdx.y
        if n < y.shape[1]:
            total = ZERO
            for split in range(partial.shape[0]):
                total += partial[split, t, n]
            y[t, n] = total * scale[n] if scaled else total

    return sum_splits


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype, m in FULL_LINE.items():
        yield f"split_k_{dtype}", make_partial(dtype, m, 8), (F32_2D, packed_type(dtype, m), F32_3D)
        yield f"split_k_sum_{dtype}", make_sum(dtype), (F32_3D, F32_1D, F32_2D)
