"""(a, b) <- (a cos - b sin, b cos + a sin) for each pair (a, b) of a head's first r dimensions

qkv float32 [T, H+2G, d] in place on its first `num_rotated` heads; cos, sin float32 [P, r/2]; index int32 [T] names token
t's row in them. All in global memory. Reads and writes 4*T*num_rotated*r bytes each, 3 operations a number: bound by bytes.

    block t -> token t; its threads walk over (head, pair), pairs side by side

Pairs are (2i, 2i+1) if interleaved, else (i, i + r/2). The launcher rejects: r > d, more heads than qkv has, tables of
unequal shape, an index that is not int32 [T]. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from numba import types

from l1_kernels.carrier import F32_2D, F32_3D, I32_1D
from l1_kernels.cuda_api import cuda


@cuda.jit(device=True)
def turned(x, y, c, s):
    """x c + y s, of which y s is rounded by itself: every kernel that calls this leaves the same bits. Left to the compiler, it may be
    the other product in the next kernel."""
    return cuda.fma(x, c, y * s)


@cache
def make_rotary(interleaved: bool) -> Callable[..., Any]:
    """kernel(qkv, num_rotated, cos, sin, index)[T, threads]."""

    @cuda.jit
    def rotary(qkv, num_rotated, cos, sin, index):
        t = cuda.blockIdx.x
        row = index[t]
        half = cos.shape[1]
        for item in range(cuda.threadIdx.x, num_rotated * half, cuda.blockDim.x):
            head = item // half
            pair = item - head * half
            if interleaved:
                first, second = 2 * pair, 2 * pair + 1
            else:
                first, second = pair, pair + half
            a, b = qkv[t, head, first], qkv[t, head, second]
            c, s = cos[row, pair], sin[row, pair]
            qkv[t, head, first] = turned(a, b, c, -s)
            qkv[t, head, second] = turned(b, a, c, s)

    return rotary


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for interleaved in (False, True):
        name = "rotary_interleaved" if interleaved else "rotary_halves"
        yield name, make_rotary(interleaved), (F32_3D, types.int64, F32_2D, F32_2D, I32_1D)
