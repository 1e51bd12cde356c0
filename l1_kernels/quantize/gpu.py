"""scale[t] * (low[t, k] + 128 * high[t, k]) ~ y[t, k], of y = x or norm(x): quantize/reference.py, with the norm before it in one launch.

x [T, K] in global memory (float32, or the 16 bits that a region hands on); low, high int8 [T, K] and scale float32 [T], or the
numbers left of y, float32 [T, K]. Reads x once (8 K bytes more of a norm's vectors), writes 2 K bytes a token: bound by the time of its
6 to 8 sums and maxima over a block, some 5 us, so it is worth its launch where a product is bound by operations.

    block t -> token t; a thread's numbers k = i, i + (all threads), ... lie in shared memory, 4 K bytes, which only it reads

Sweeps: the norm's statistics, the mean of |y|, twice the mean of those that are not large, the two maxima, and the result.
The launcher rejects what reference.py does not take, and a K beyond shared memory. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, I32_2D, array_type, loader
from l1_kernels.cuda_api import cuda, early, math
from l1_kernels.quantize.reference import FINE_LARGEST, LARGEST, OUTLIER, ROUNDS, STEP, TRIM

NORMS = ("layernorm", "rmsnorm")
MOST_WARPS = 32  # of a block
ZERO, ONE = np.float32(0), np.float32(1)
trim, outlier, largest, step = (np.float32(number) for number in (TRIM, OUTLIER, LARGEST, STEP))
ROUND = np.float32(3 << 22)  # added and taken away again, it leaves the nearest integer, of two the even one, of up to 2^22
FLOAT_MAX, NOT_A_NUMBER = np.float32(3.4028235e38), np.float32(np.nan)
reduce_sum, reduce_max, lane_index, warp_index, num_warps = groups.reduce_sum, groups.reduce_max, groups.lane, groups.warp, groups.num_warps


@cache
def make_across(largest_of: bool) -> Callable[..., Any]:
    """across(value, scratch): the sum over the block, or the largest, in every thread. groups.block_sum and block_max have a scratch of
    their own each, and numba names both alike in one kernel."""
    in_tile = reduce_max if largest_of else reduce_sum

    @cuda.jit(device=True)
    def across(value, scratch):
        part = in_tile(value)
        if lane_index() == 0:
            scratch[warp_index()] = part
        cuda.syncthreads()
        whole = scratch[0]
        for w in range(1, num_warps()):
            whole = max(whole, scratch[w]) if largest_of else whole + scratch[w]
        cuda.syncthreads()  # the next call writes to scratch
        return whole

    return across


@cache
def make_quantize(dtype: str, norm: str | None, wide: bool, fine: bool = False) -> Callable[..., Any]:
    """kernel(x, gain, shift, has_shift, eps, low, high, scale, y)[T, threads, stream, 4 K]; threads a multiple of 32.

    dtype    "fp32" | "fp16" | "bf16": x's carrier
    norm     None | "layernorm" | "rmsnorm", with gain, shift, eps
    wide     y is written; otherwise low, high and scale are
    fine     15 bits for every number, not for outliers alone
    """
    reach = np.float32(FINE_LARGEST if fine else LARGEST * STEP)
    rounds = 0 if fine else ROUNDS
    load, centred = loader(dtype), norm == "layernorm"
    block_sum, block_max = make_across(False), make_across(True)

    @cuda.jit(device=True)
    def take(x, gain, shift, has_shift, eps, t, row, scratch):
        """This thread's numbers of norm(x[t]) -> row."""
        size = x.shape[1]
        for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            row[k] = load(x[t, k])
        if norm is None:
            return
        mean = ZERO
        if centred:
            part = ZERO
            for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                part += row[k]
            mean = block_sum(part, scratch) / np.float32(size)
        part = ZERO
        for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            part += (row[k] - mean) * (row[k] - mean)
        factor = ONE / math.sqrt(block_sum(part, scratch) / np.float32(size) + eps)
        for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            row[k] = (row[k] - mean) * factor * gain[k] + (shift[k] if has_shift else ZERO)

    @cuda.jit(device=True)
    def mean_within(row, size, limit, scratch):
        total, count = ZERO, ZERO
        for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            if abs(row[k]) <= limit:
                total += abs(row[k])
                count += ONE
        total, count = block_sum(total, scratch), block_sum(count, scratch)
        return total / max(count, ONE)

    @early()
    @cuda.jit
    def quantize(x, gain, shift, has_shift, eps, low, high, scale, y):
        ptx.take_turn()
        row = cuda.shared.array(0, types.float32)
        scratch = cuda.shared.array(MOST_WARPS, types.float32)
        t = cuda.blockIdx.x
        size = x.shape[1]
        take(x, gain, shift, has_shift, eps, t, row, scratch)
        part = ZERO
        for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            part += abs(row[k])
        total = block_sum(part, scratch)
        mean = total / np.float32(size)
        for _ in range(rounds):
            mean = mean_within(row, size, trim * mean, scratch)
        limit = np.float32(-1) if fine else outlier * mean
        top, inner = ZERO, ZERO
        for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            number = abs(row[k])
            top = max(top, number)
            if number <= limit:
                inner = max(inner, number)
        unit = max(block_max(inner, scratch) / largest, block_max(top, scratch) / reach)
        if unit == ZERO:
            unit = ONE
        if not total <= FLOAT_MAX:  # a NaN or an infinity among them
            unit = NOT_A_NUMBER
        if not wide and cuda.threadIdx.x == 0:
            scale[t] = unit
        for k in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            ratio = row[k] / unit
            upper = (ratio / step + ROUND) - ROUND if abs(row[k]) > limit else ZERO
            lower = (ratio - step * upper + ROUND) - ROUND
            if wide:
                y[t, k] = unit * (lower + step * upper)
            else:
                low[t, k] = np.int8(np.int32(lower)) if unit == unit else np.int8(0)
                high[t, k] = np.int8(np.int32(upper)) if unit == unit else np.int8(0)

    return quantize


@cache
def make_scale_planes(add: bool) -> Callable[..., Any]:
    """kernel(fine, coarse, scale_x, scale, bias, has_bias, y)[(columns, rows), threads]: what follows a library's products of both
    planes with int8 weights, int32 [T, N]: y [T, N] = (or +=) scale_x[t] * scale[n] * (fine + 128 coarse) + bias[n]."""

    @cuda.jit
    def scale_planes(fine, coarse, scale_x, scale, bias, has_bias, y):
        first, across = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.gridDim.x * cuda.blockDim.x
        for t in range(cuda.blockIdx.y, y.shape[0], cuda.gridDim.y):
            for n in range(first, y.shape[1], across):
                number = scale_x[t] * scale[n] * (np.float32(fine[t, n]) + step * np.float32(coarse[t, n]))
                number += bias[n] if has_bias else ZERO
                if add:
                    y[t, n] += number
                else:
                    y[t, n] = number

    return scale_planes


def signature(dtype: str) -> tuple[types.Type, ...]:
    number = array_type("int8", 2)
    return (array_type(dtype, 2), F32_1D, F32_1D, types.boolean, types.float32, number, number, F32_1D, F32_2D)


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for norm in (None, *NORMS):
        yield f"quantize_fp32_{norm}", make_quantize("fp32", norm, False), signature("fp32")
        yield f"quantize_fp32_{norm}_fine", make_quantize("fp32", norm, False, True), signature("fp32")
    yield "quantize_fp16", make_quantize("fp16", None, False), signature("fp16")
    yield "round_fp32", make_quantize("fp32", None, True), signature("fp32")
    for add in (False, True):
        yield f"scale_planes{'_add' if add else ''}", make_scale_planes(add), (I32_2D, I32_2D, F32_1D, F32_1D, F32_1D, types.boolean, F32_2D)
