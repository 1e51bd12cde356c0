"""Rung 3: output tiles, and the reduction that the paper argues against: a binary tree in shared memory.

y[t, n] = sum_k x[t, k] * w[n, k] with w in layout.py's packed form. A block makes 32 outputs, a lane one; its WARPS warps
share k, and each leaves a partial sum of every output in shared memory, parts [WARPS, 32].

    parts[0..W/2) += parts[W/2..W);  barrier;  parts[0..W/4) += parts[W/4..W/2);  barrier;  ...

1 + log2(WARPS) barriers, and at each level half of the warps that were left have nothing to do but wait.
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
def make_tree(dtype: str, m: int, warps: int) -> Callable[..., Any]:
    """kernel(x, packed, scale, y)[(N / 32, T), 32 * warps], the quotient rounded up; warps a power of two."""
    share, scaled = make_share(dtype, m), dtype == "int8"
    parts_size, half = 32 * warps, warps // 2

    @cuda.jit
    def tree(x, packed, scale, y):
        parts = cuda.shared.array(parts_size, types.float32)
        lane, warp, t = lane_index(), warp_index(), cuda.blockIdx.y
        n = cuda.blockIdx.x * 32 + lane
        inside = n < y.shape[1]
        total = ZERO
        if inside:
            total = share(x, t, packed, y.shape[1], n, warp, (x.shape[1] + m - 1) // m, warps)
        parts[warp * 32 + lane] = total
        cuda.syncthreads()
        left = half
        while left > 0:
            if warp < left:
                parts[warp * 32 + lane] += parts[(warp + left) * 32 + lane]
            cuda.syncthreads()
            left >>= 1
        if warp == 0 and inside:
            y[t, n] = parts[lane] * scale[n] if scaled else parts[lane]

    return tree


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in DTYPES:
        yield f"tree_{dtype}", make_tree(dtype, 1, 8), (F32_2D, packed_type(dtype, 1), F32_1D, F32_2D)
    for warps in (2, 32):
        yield f"tree_fp16_{warps}_warps", make_tree("fp16", 1, warps), (F32_2D, packed_type("fp16", 1), F32_1D, F32_2D)
