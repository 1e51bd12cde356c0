"""Rung 6, the paper's layout (Section III-C), and the inner loop of rungs 3 to 5: w re-laid so that a lane is an output.

packed[k / M, n, k % M] = w[n, k]: M neighbours along the input lie together, then the outputs. A warp reads 32 outputs'
M numbers in one go: with M = 1 and 16 bits 64 bytes, half a cache line; with M = 2 (fp16) or M = 4 (int8) all 128 bytes.
More outputs a lane would fill the line too, but halve the tiles, and with them the blocks. Made once, when a model is loaded.

    block -> 32 outputs of one token;  lane -> one output;  warp -> every WARPS-th step of M along k; sums by transpose.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import ptx
from l1_kernels.carrier import F32_1D, F32_2D, array_type, loader
from l1_kernels.cuda_api import cuda
from l1_kernels.weight import Array, Weight

ZERO = np.float32(0)
FULL_LINE = {"fp32": 1, "fp16": 2, "bf16": 2, "int8": 4}  # the M that makes 128 bytes of 32 lanes
WORD = types.Array(types.uint32, 1, "C")


def relay(weight: Weight, m: int) -> Array:
    """w [N, K] -> packed, flat [ceil(K / m) * N * m] with zeros at the end of k; for m > 1 as uint32, a word an output."""
    data = weight.data
    xp: Any = np
    if not isinstance(data, np.ndarray):
        import cupy

        xp = cupy
    num_out, size = data.shape
    steps = -(-size // m)
    padded = xp.zeros((num_out, steps * m), data.dtype)
    padded[:, :size] = data
    packed = xp.ascontiguousarray(padded.reshape(num_out, steps, m).transpose(1, 0, 2)).reshape(-1)
    return packed.view(np.uint32) if m > 1 else packed


@cache
def make_share(dtype: str, m: int) -> Callable[..., Any]:
    """share(x, t, packed, num_out, n, first, last, stride): the sum over steps first, first + stride, ... of k for output n."""
    load = loader(dtype) if m == 1 else None
    pair = ptx.bf16x2_to_f32x2 if dtype == "bf16" else ptx.f16x2_to_f32x2

    @cuda.jit(device=True)
    def ones(x, t, packed, num_out, n, first, last, stride):
        total = ZERO
        for k in range(first, last, stride):
            total += x[t, k] * load(packed[k * num_out + n])
        return total

    @cuda.jit(device=True)
    def twos(x, t, packed, num_out, n, first, last, stride):
        total = ZERO
        for step in range(first, last, stride):
            a, b = pair(packed[step * num_out + n])
            k = 2 * step
            total += x[t, k] * a
            if k + 1 < x.shape[1]:
                total += x[t, k + 1] * b
        return total

    @cuda.jit(device=True)
    def fours(x, t, packed, num_out, n, first, last, stride):
        total = ZERO
        end = x.shape[1]
        for step in range(first, last, stride):
            low, high = ptx.s8x4_to_f16x4(packed[step * num_out + n])
            a, b = pair(low)
            c, d = pair(high)
            k = 4 * step
            total += x[t, k] * a
            if k + 1 < end:
                total += x[t, k + 1] * b
            if k + 2 < end:
                total += x[t, k + 2] * c
            if k + 3 < end:
                total += x[t, k + 3] * d
        return total

    return {1: ones, 2: twos, 4: fours}[m]


def packed_type(dtype: str, m: int) -> types.Array:
    return array_type(dtype, 1) if m == 1 else WORD


@cache
def make_layout(dtype: str, m: int, warps: int) -> Callable[..., Any]:
    """kernel(x, packed, scale, y)[(N / 32, T), 32 * warps], the quotient rounded up. The reduction is transpose.py's."""
    from l1_kernels.sbi_gemm.transpose import make_transpose

    return make_transpose(dtype, m, warps)


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype, m in FULL_LINE.items():
        yield f"layout_{dtype}", make_layout(dtype, m, 8), (F32_2D, packed_type(dtype, m), F32_1D, F32_2D)


