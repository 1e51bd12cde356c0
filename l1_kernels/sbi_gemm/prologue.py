"""The norm as a prologue: every block makes all of norm(x) again, rounded, in its shared memory.

    LayerNorm (x - mean) / sqrt(var + eps) * gain + shift        RMSNorm x / sqrt(mean(x^2) + eps) * gain

x float32 [T, D] in global memory (after the first block in L2) -> rows of 16-bit pairs in shared memory, `pitch` words apart
(float32 for fp32 weights). Each block reads 8*T*D bytes from L2 (twice: statistics, numbers), the grid blocks * 8*T*D.

Statistics in one pass: sums of x - c and of its square, with c the mean of the row's first 128 numbers. An outlier that
pulls c away by o / 128 also makes the variance at least o^2 / D, so for D <= 16384 the correction (mean - c)^2 is no larger
than the variance, and nothing cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.cuda_api import cuda, math
from l1_kernels.sbi_gemm.words import make_pack

ZERO, ONE = np.float32(0), np.float32(1)
GUESS = np.float32(1 / 128)
MAX_WARPS = 32
SUMS = 2 * MAX_WARPS
NORMS = ("layernorm", "rmsnorm")
reduce_sum, lane_index, warp_index, num_warps = groups.reduce_sum, groups.lane, groups.warp, groups.num_warps


@cache
def make_put(dtype: str) -> Callable[..., Any]:
    """put(row, k, eight numbers): into shared memory, k a multiple of 8 from the row's start `first` in elements."""
    if dtype == "fp32":

        @cuda.jit(device=True, forceinline=True)
        def put(shared, first, k, v):
            for i in range(8):
                shared[first + k + i] = v[i]

    else:
        pack = make_pack("bf16" if dtype == "bf16" else "fp16")

        @cuda.jit(device=True, forceinline=True)
        def put(shared, first, k, v):
            words = (pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]))
            ptx.store16_shared(shared, first + (k >> 1), words)

    return put


@cache
def make_norm(kind: str, dtype: str, together: bool) -> Callable[..., Any]:
    """norm(x, gain, shift, has_shift, eps, shared, pitch) by the whole block, D a multiple of 8; ends with a barrier.

    together    the block works on one token at a time (T = 1); otherwise each warp on tokens of its own
    """
    centred = kind == "layernorm"
    put = make_put(dtype)

    @cuda.jit(device=True)
    def norm(x, gain, shift, has_shift, eps, shared, pitch):
        sums = cuda.shared.array(SUMS, types.float32)
        num_tokens, size = x.shape
        lane, warp, warps = lane_index(), warp_index(), num_warps()
        stride = 256
        start = lane * 8
        first_token, token_step = warp, warps
        if together:
            stride *= warps
            start += warp * 256
            first_token, token_step = 0, 1
        for t in range(first_token, num_tokens, token_step):
            base = t * size
            guess = ZERO
            if centred:
                a, b, c, d = ptx.load16_floats(x, base + min(lane * 4, size - 4))
                guess = reduce_sum(a + b + c + d) * GUESS
            total, squares = ZERO, ZERO
            for k in range(start, size, stride):
                a, b, c, d = ptx.load16_floats(x, base + k)
                e, f, g, h = ptx.load16_floats(x, base + k + 4)
                a -= guess
                b -= guess
                c -= guess
                d -= guess
                e -= guess
                f -= guess
                g -= guess
                h -= guess
                total += ((a + b) + (c + d)) + ((e + f) + (g + h))
                squares += ((a * a + b * b) + (c * c + d * d)) + ((e * e + f * f) + (g * g + h * h))
            total, squares = reduce_sum(total), reduce_sum(squares)
            if together:
                if lane == 0:
                    sums[warp] = total
                    sums[MAX_WARPS + warp] = squares
                cuda.syncthreads()
                total = reduce_sum(sums[lane] if lane < warps else ZERO)
                squares = reduce_sum(sums[MAX_WARPS + lane] if lane < warps else ZERO)
            count = np.float32(size)
            off = total / count if centred else ZERO
            mean = guess + off
            factor = ONE / math.sqrt(max(squares / count - off * off, ZERO) + eps)
            for k in range(start, size, stride):
                a, b, c, d = ptx.load16_floats(x, base + k)
                e, f, g, h = ptx.load16_floats(x, base + k + 4)
                p, q, r, s = ptx.load16_floats(gain, k)
                u, v, w, z = ptx.load16_floats(gain, k + 4)
                a = (a - mean) * factor * p
                b = (b - mean) * factor * q
                c = (c - mean) * factor * r
                d = (d - mean) * factor * s
                e = (e - mean) * factor * u
                f = (f - mean) * factor * v
                g = (g - mean) * factor * w
                h = (h - mean) * factor * z
                if has_shift:
                    p, q, r, s = ptx.load16_floats(shift, k)
                    u, v, w, z = ptx.load16_floats(shift, k + 4)
                    a += p
                    b += q
                    c += r
                    d += s
                    e += u
                    f += v
                    g += w
                    h += z
                put(shared, t * pitch, k, (a, b, c, d, e, f, g, h))
        cuda.syncthreads()

    return norm
