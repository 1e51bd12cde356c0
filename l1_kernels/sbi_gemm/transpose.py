"""Rung 4, the paper's reduction (Section III-C): transpose the partial sums in shared memory, then reduce in registers.

As tree.py, but the partial sums go to parts [32, WARPS], so that those of one output are neighbours. After one barrier each
warp takes 32 / WARPS outputs: a lane reads one partial sum, log2(WARPS) shuffles add them within the warp, and the first lane
of each output writes the result back, where all 32 are neighbours again: after a second barrier one warp writes them to global
memory, 128 bytes at once. Two barriers however many warps there are; shuffles need none.
(Rows of parts are WARPS + 1 long: a column then lies in 32 different banks.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from numba import types

from l1_kernels import groups
from l1_kernels.carrier import DTYPES, F32_1D, F32_2D
from l1_kernels.cuda_api import cuda
from l1_kernels.sbi_gemm.layout import ZERO, make_share, packed_type

lane_index, warp_index = groups.lane, groups.warp


@cache
def make_reduce(warps: int) -> Callable[..., Any]:
    """reduce(total): in warp 0, lane l: the sum over warps of lane l's totals."""
    pitch = warps + 1
    parts_size = 32 * pitch
    outputs = 32 // warps  # of a warp

    @cuda.jit(device=True)
    def reduce(total):
        parts = cuda.shared.array(parts_size, types.float32)
        whole = cuda.shared.array(32, types.float32)
        lane, warp = lane_index(), warp_index()
        parts[lane * pitch + warp] = total
        cuda.syncthreads()
        output = warp * outputs + lane // warps  # the lane holds partial sum lane % warps of it
        value = parts[output * pitch + lane % warps]
        delta = warps // 2
        while delta > 0:
            value += groups.shfl_down(value, delta)
            delta >>= 1
        if lane % warps == 0:
            whole[output] = value
        cuda.syncthreads()
        return whole[lane]

    return reduce


@cache
def make_transpose(dtype: str, m: int, warps: int) -> Callable[..., Any]:
    """kernel(x, packed, scale, y)[(N / 32, T), 32 * warps], the quotient rounded up; warps a power of two."""
    share, reduce, scaled = make_share(dtype, m), make_reduce(warps), dtype == "int8"

    @cuda.jit
    def transpose(x, packed, scale, y):
        lane, warp, t = lane_index(), warp_index(), cuda.blockIdx.y
        n = cuda.blockIdx.x * 32 + lane
        inside = n < y.shape[1]
        total = ZERO
        if inside:
            total = share(x, t, packed, y.shape[1], n, warp, (x.shape[1] + m - 1) // m, warps)
        total = reduce(total)
        if warp == 0 and inside:
            y[t, n] = total * scale[n] if scaled else total

    return transpose


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in DTYPES:
        yield f"transpose_{dtype}", make_transpose(dtype, 1, 8), (F32_2D, packed_type(dtype, 1), F32_1D, F32_2D)
    for warps in (2, 32):
        yield f"transpose_fp16_{warps}_warps", make_transpose("fp16", 1, warps), (F32_2D, packed_type("fp16", 1), F32_1D, F32_2D)
