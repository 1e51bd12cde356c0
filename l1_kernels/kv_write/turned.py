"""Rotary and cache write in one launch: queries turn in place, keys turn on their way into the cache, values go as they are.

qkv float32 [T, H+2G, d]; cos, sin float32 [P, r/2], index int32 [T] (rotary/gpu.py); caches [B, G, S, d] in their dtype's
carrier, rows, positions int32 [T] (kv_write/gpu.py): all in global memory. A key is read once and never written back: with
2G heads of d numbers that saves 8*T*G*d bytes and a launch. Bound by bytes.

    warp -> one head of one token; its lanes walk over the pairs that turn, then over the dimensions that do not
    block (t, j) of WARPS warps -> heads first + WARPS * j .. of token t; first is 0, or H where nothing turns

The launcher rejects what those of rotary and cache write reject. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_2D, F32_3D, FLOATS, I32_1D, array_type, storer
from l1_kernels.cuda_api import cuda, early

WARPS = 8
lane_index, warp_index = groups.lane, groups.warp


@cache
def make_turn_and_write(dtype: str, turns: bool, interleaved: bool) -> Callable[..., Any]:
    """kernel(qkv, num_heads, cos, sin, index, cache_k, cache_v, rows, positions)
    [(T, ceil((turns ? H + 2G : 2G) / WARPS)), WARPS * 32]; turns False: cos, sin and index are not read."""
    store = storer(dtype)

    @early(alone="cache")
    @cuda.jit
    def turn_and_write(qkv, num_heads, cos, sin, index, cache_k, cache_v, rows, positions):
        ptx.take_turn()
        t = cuda.blockIdx.x
        head = cuda.blockIdx.y * WARPS + warp_index()
        if not turns:
            head += num_heads
        num_kv_heads, head_dim = cache_k.shape[1], cache_k.shape[3]
        if head >= num_heads + 2 * num_kv_heads:
            return
        row, position = rows[t], positions[t]
        half = cos.shape[1] if turns else 0
        if head < num_heads + num_kv_heads:
            g = head - num_heads  # below 0: a query
            for pair in range(lane_index(), half, 32):
                first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
                a, b = qkv[t, head, first], qkv[t, head, second]
                c, s = cos[index[t], pair], sin[index[t], pair]
                a, b = a * c - b * s, b * c + a * s
                if g < 0:
                    qkv[t, head, first] = a
                    qkv[t, head, second] = b
                else:
                    cache_k[row, g, position, first] = store(a)
                    cache_k[row, g, position, second] = store(b)
            if g >= 0:
                for i in range(2 * half + lane_index(), head_dim, 32):
                    cache_k[row, g, position, i] = store(qkv[t, head, i])
        else:
            g = head - num_heads - num_kv_heads
            for i in range(lane_index(), head_dim, 32):
                cache_v[row, g, position, i] = store(qkv[t, head, i])

    return turn_and_write


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in FLOATS:
        held = array_type(dtype, 4)
        signature = (F32_3D, types.int64, F32_2D, F32_2D, I32_1D, held, held, I32_1D, I32_1D)
        for name, turns, interleaved in (("halves", True, False), ("interleaved", True, True), ("write", False, False)):
            yield f"turn_and_write_{dtype}_{name}", make_turn_and_write(dtype, turns, interleaved), signature
