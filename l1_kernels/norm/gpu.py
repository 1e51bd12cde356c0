"""LayerNorm: y = (x - mean) / sqrt(var + eps) * w + b.  RMSNorm: y = x / sqrt(mean(x^2) + eps) * w.

x, y float32 [T, D]; w, b float32 [D]; qkv float32 [T, H+2G, d]: all in global memory, sums in registers and `block_sum`'s
32 shared floats. Reads 4(T*D + 2D) bytes (LayerNorm walks its row three times, the last two out of L1/L2), writes 4*T*D, about 6
operations a number: bound by bytes.

    layer_norm, rms_norm, sum_squares, span_norm    block t -> token t; sums over warps by `block_sum`
    head_norm                                       warp    -> one head of one token; `reduce_sum` alone

The launcher rejects: x that is not float32 [T, D], weights of another width, heads that qkv has not. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, F32_3D
from l1_kernels.cuda_api import cuda, early, math

ZERO, ONE = np.float32(0), np.float32(1)
block_sum, reduce_sum, lane_index = groups.block_sum, groups.reduce_sum, groups.lane


@cache
def make_layer_norm() -> Callable[..., Any]:
    """kernel(x, weight, bias, has_bias, eps, y)[T, threads]; threads a multiple of 32."""

    @early()
    @cuda.jit
    def layer_norm(x, weight, bias, has_bias, eps, y):
        ptx.take_turn()
        t = cuda.blockIdx.x
        size = x.shape[1]
        part = ZERO
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            part += x[t, i]
        mean = block_sum(part) / np.float32(size)
        part = ZERO
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            centred = x[t, i] - mean
            part += centred * centred
        variance = block_sum(part) / np.float32(size)
        factor = ONE / math.sqrt(variance + eps)
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            shift = bias[i] if has_bias else ZERO
            y[t, i] = (x[t, i] - mean) * factor * weight[i] + shift

    return layer_norm


@cache
def make_rms_norm() -> Callable[..., Any]:
    """kernel(x, weight, eps, y)[T, threads]; threads a multiple of 32."""

    @early()
    @cuda.jit
    def rms_norm(x, weight, eps, y):
        ptx.take_turn()
        t = cuda.blockIdx.x
        size = x.shape[1]
        part = ZERO
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            part += x[t, i] * x[t, i]
        mean_square = block_sum(part) / np.float32(size)
        factor = ONE / math.sqrt(mean_square + eps)
        for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            y[t, i] = x[t, i] * factor * weight[i]

    return rms_norm


@cache
def make_head_norm() -> Callable[..., Any]:
    """kernel(qkv, first, weight, eps)[(T, count), 32]: in place."""

    @cuda.jit
    def head_norm(qkv, first, weight, eps):
        t = cuda.blockIdx.x
        head = first + cuda.blockIdx.y
        size = qkv.shape[2]
        part = ZERO
        for i in range(lane_index(), size, 32):
            part += qkv[t, head, i] * qkv[t, head, i]
        factor = ONE / math.sqrt(reduce_sum(part) / np.float32(size) + eps)
        for i in range(lane_index(), size, 32):
            qkv[t, head, i] = qkv[t, head, i] * factor * weight[i]

    return head_norm


@cache
def make_sum_squares() -> Callable[..., Any]:
    """kernel(qkv, first, count, total)[T, threads]; threads a multiple of 32."""

    @cuda.jit
    def sum_squares(qkv, first, count, total):
        t = cuda.blockIdx.x
        size = qkv.shape[2]
        part = ZERO
        for item in range(cuda.threadIdx.x, count * size, cuda.blockDim.x):
            head = item // size
            number = qkv[t, first + head, item - head * size]
            part += number * number
        whole = block_sum(part)
        if cuda.threadIdx.x == 0:
            total[t] = whole

    return sum_squares


@cache
def make_span_norm() -> Callable[..., Any]:
    """kernel(qkv, first, total, size, weight, eps)[T, threads]: in place; weight [count * d] says how many heads."""

    @cuda.jit
    def span_norm(qkv, first, total, size, weight, eps):
        t = cuda.blockIdx.x
        width = qkv.shape[2]
        factor = ONE / math.sqrt(total[t] / np.float32(size) + eps)
        for item in range(cuda.threadIdx.x, weight.shape[0], cuda.blockDim.x):
            head = item // width
            qkv[t, first + head, item - head * width] *= factor * weight[item]

    return span_norm


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    f32, i64 = types.float32, types.int64
    yield "layer_norm", make_layer_norm(), (F32_2D, F32_1D, F32_1D, types.boolean, f32, F32_2D)
    yield "rms_norm", make_rms_norm(), (F32_2D, F32_1D, f32, F32_2D)
    yield "head_norm", make_head_norm(), (F32_3D, i64, F32_1D, f32)
    yield "sum_squares", make_sum_squares(), (F32_3D, i64, i64, F32_1D)
    yield "span_norm", make_span_norm(), (F32_3D, i64, F32_1D, i64, F32_1D, f32)
