"""o[t, h] = sum_j p_j v_j,  p = softmax_j(scale * q[t, h] . k_j + slope[h] * (j - (ends[t] - 1))),  j in [start, ends[t])

qkv float32 [T, H+2G, d], caches [B, G, S, d] in their dtype's carrier, rows and ends int32 [T], slopes float32 [H], out
float32 [T, H*d]: all in global memory; q and the running sum of a warp in registers, d/32 numbers a lane each.
With L keys a token: 4*T*H*L*d operations; every (t, h) reads its keys and values, 2*L*d numbers, of which the H/G heads
of a group and the tokens of a prompt find most in L2: bound by bytes (a decode step), by latency of the shuffles (a prompt).

    block (t, h) -> token t, query head h. Warp w takes keys start + w, start + w + 4, ...; lane l the dimensions
    l, l + 32, ... of q, k and v (coalesced). A warp's online softmax keeps (best score, sum, weighted values) and rescales
    when a better score comes; the warps' three are joined in shared memory.

The launcher rejects: d > 256, caches that do not fit qkv, H that G does not divide, rows or ends that are not int32 [T],
slopes that are not float32 [H]. A token without keys gives zeros. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups
from l1_kernels.carrier import F32_1D, F32_2D, F32_3D, FLOATS, I32_1D, array_type, loader
from l1_kernels.cuda_api import at_most, cuda, math

MAX_HEAD_DIM = 256
WARPS = 4  # a block
ZERO, LOWEST = np.float32(0), np.float32(-3.0e38)  # LOWEST is finite, so that LOWEST - LOWEST is 0
reduce_sum, lane_index, warp_index = groups.reduce_sum, groups.lane, groups.warp


@cache
def make_attention(dtype: str, per_lane: int) -> Callable[..., Any]:
    """kernel(qkv, num_heads, cache_k, cache_v, rows, ends, window, scale, slopes, has_slopes, out)[(T, H), WARPS * 32];
    d <= 32 * per_lane."""
    load = loader(dtype)
    pitch = 32 * per_lane
    shared_size = WARPS * pitch

    @at_most(32 * WARPS)
    @cuda.jit
    def attention(qkv, num_heads, cache_k, cache_v, rows, ends, window, scale, slopes, has_slopes, out):
        warp_values = cuda.shared.array(shared_size, types.float32)
        warp_best = cuda.shared.array(WARPS, types.float32)
        warp_sum = cuda.shared.array(WARPS, types.float32)
        t, h = cuda.blockIdx.x, cuda.blockIdx.y
        lane, warp = lane_index(), warp_index()
        head_dim = cache_k.shape[3]
        g = h // (num_heads // cache_k.shape[1])
        row, end = rows[t], ends[t]
        start = max(0, end - window) if window > 0 else 0
        slope = slopes[h] if has_slopes else ZERO

        query = cuda.local.array(per_lane, types.float32)
        values = cuda.local.array(per_lane, types.float32)
        for i in range(per_lane):
            dimension = i * 32 + lane
            query[i] = qkv[t, h, dimension] * scale if dimension < head_dim else ZERO
            values[i] = ZERO
        best, total = LOWEST, ZERO
        for key in range(start + warp, end, WARPS):
            part = ZERO
            for i in range(per_lane):
                dimension = i * 32 + lane
                if dimension < head_dim:
                    part += query[i] * load(cache_k[row, g, key, dimension])
            score = reduce_sum(part) + slope * np.float32(key - (end - 1))
            better = max(best, score)
            shrink = math.exp(best - better)
            p = math.exp(score - better)
            total = total * shrink + p
            for i in range(per_lane):
                dimension = i * 32 + lane
                if dimension < head_dim:
                    values[i] = values[i] * shrink + p * load(cache_v[row, g, key, dimension])
            best = better

        for i in range(per_lane):
            warp_values[warp * pitch + i * 32 + lane] = values[i]
        if lane == 0:
            warp_best[warp] = best
            warp_sum[warp] = total
        cuda.syncthreads()
        best = LOWEST
        for w in range(WARPS):
            best = max(best, warp_best[w])
        total = ZERO
        for w in range(WARPS):
            total += warp_sum[w] * math.exp(warp_best[w] - best)
        for dimension in range(cuda.threadIdx.x, head_dim, WARPS * 32):
            value = ZERO
            for w in range(WARPS):
                value += warp_values[w * pitch + dimension] * math.exp(warp_best[w] - best)
            out[t, h * head_dim + dimension] = value / total if start < end else ZERO

    return attention


def lanes_share(head_dim: int) -> int:
    """How many dimensions a lane holds: the smallest compiled variant that fits."""
    return next(per_lane for per_lane in (1, 2, 4, 8) if head_dim <= 32 * per_lane)


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in FLOATS:
        cache_type = array_type(dtype, 4)
        signature = (
            F32_3D, types.int64, cache_type, cache_type, I32_1D, I32_1D, types.int64, types.float32, F32_1D, types.boolean, F32_2D,
        )  # fmt: skip
        for per_lane in (1, 2, 4, 8):
            yield f"attention_{dtype}_{32 * per_lane}", make_attention(dtype, per_lane), signature
