"""The norm as a prologue: every block makes all of norm(x) again, rounded, in its shared memory.

    LayerNorm (x - mean) / sqrt(var + eps) * gain + shift        RMSNorm x / sqrt(mean(x^2) + eps) * gain

x float32 [T, D] in global memory (after the first block in L2) -> rows of 16-bit pairs in shared memory, `pitch` words apart
(float32 for fp32 weights). Each block reads 8*T*D bytes from L2 (twice: statistics, numbers), the grid blocks * 8*T*D.

Statistics in one pass: sums of x - c and of its square, with c the mean of the row's first 128 numbers. An outlier that
pulls c away by o / 128 also makes the variance at least o^2 / D, so for D <= 16384 the correction (mean - c)^2 is no larger
than the variance, and nothing cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, array_type
from l1_kernels.cuda_api import cuda, early, math
from l1_kernels.sbi_gemm.words import ZEROS4, make_pack

ZERO, ONE = np.float32(0), np.float32(1)
HELD_PIECES = 2  # of 8 numbers a thread; a longer x is read again for each step of its norm
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


def pieces_of(size: int, threads: int) -> int:
    """How many times 8 numbers a thread hold x [size] in registers; 0: too many."""
    pieces = -(-size // (8 * threads))
    return pieces if pieces <= HELD_PIECES else 0


@cache
def make_ask(pieces: int, threads: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(ask, ask_x): the loads of a norm of one token, PIECES * 8 numbers a thread, all under way together.

    ask(held, size, gain, shift, has_shift)    of its vectors, which wait for nobody
    ask_x(held, x, t)                          of row t of x
    """
    stride = 8 * threads

    @cuda.jit(device=True, forceinline=True)
    def put(held, at, v):
        held[at], held[at + 1], held[at + 2], held[at + 3] = v[0], v[1], v[2], v[3]

    @cuda.jit(device=True, forceinline=True)
    def ask(held, size, gain, shift, has_shift):
        for p in range(pieces):
            k = cuda.threadIdx.x * 8 + p * stride
            for half in range(2):
                at = (p * 2 + half) * 12
                put(held, at + 8, ZEROS4)
                if k < size:
                    put(held, at + 4, ptx.load16_floats(gain, k + 4 * half))
                    if has_shift:
                        put(held, at + 8, ptx.load16_floats(shift, k + 4 * half))

    @cuda.jit(device=True, forceinline=True)
    def ask_x(held, x, t):
        size = x.shape[1]
        for p in range(pieces):
            k = cuda.threadIdx.x * 8 + p * stride
            for half in range(2):
                at = (p * 2 + half) * 12
                put(held, at, ZEROS4)
                if k < size:
                    put(held, at, ptx.load16_floats(x, t * size + k + 4 * half))

    return ask, ask_x


@cache
def make_norm_held(kind: str, dtype: str, pieces: int, threads: int, alone: bool = False) -> Callable[..., Any]:
    """norm_held(held, size, eps, out, first): the norm of one token from what `ask` and `ask_x` hold, by the whole block; ends with a barrier.
    To `out` from element `first` on: shared memory, or 16 bits in global memory (`alone`).

    Everything is in registers, so the variance takes a second pass over the differences from the mean."""
    centred = kind == "layernorm"
    put = make_put_global(dtype) if alone else make_put(dtype)
    stride = 8 * threads
    warps = threads // 32

    @cuda.jit(device=True, forceinline=True)
    def block_total(value, sums, first):
        """One barrier: `first` keeps the two sums of a norm apart."""
        value = reduce_sum(value)
        if lane_index() == 0:
            sums[first + warp_index()] = value
        cuda.syncthreads()
        return reduce_sum(sums[first + lane_index()] if lane_index() < warps else ZERO)

    @cuda.jit(device=True, forceinline=True)
    def norm_held(held, size, eps, out, first):
        sums = cuda.shared.array(SUMS, types.float32)
        count = np.float32(size)
        mean = ZERO
        if centred:
            total = ZERO
            for p in range(pieces * 2):
                at = p * 12
                total += (held[at] + held[at + 1]) + (held[at + 2] + held[at + 3])
            mean = block_total(total, sums, 0) / count
        squares = ZERO
        for p in range(pieces):
            if cuda.threadIdx.x * 8 + p * stride < size:
                for half in range(2):
                    at = (p * 2 + half) * 12
                    for i in range(4):
                        held[at + i] -= mean
                        squares += held[at + i] * held[at + i]
        factor = ONE / math.sqrt(block_total(squares, sums, MAX_WARPS) / count + eps)
        for p in range(pieces):
            k = cuda.threadIdx.x * 8 + p * stride
            if k < size:
                a = p * 24
                b = a + 12
                put(
                    out, first, k,
                    (
                        held[a] * factor * held[a + 4] + held[a + 8], held[a + 1] * factor * held[a + 5] + held[a + 9],
                        held[a + 2] * factor * held[a + 6] + held[a + 10], held[a + 3] * factor * held[a + 7] + held[a + 11],
                        held[b] * factor * held[b + 4] + held[b + 8], held[b + 1] * factor * held[b + 5] + held[b + 9],
                        held[b + 2] * factor * held[b + 6] + held[b + 10], held[b + 3] * factor * held[b + 7] + held[b + 11],
                    ),
                )  # fmt: skip
        cuda.syncthreads()

    return norm_held


@cache
def make_put_global(dtype: str) -> Callable[..., Any]:
    """put(out, first, k, eight numbers): into global memory, in 16 bits."""
    pack = make_pack(dtype)

    @cuda.jit(device=True, forceinline=True)
    def put(out, first, k, v):
        ptx.store16(out, first + k, (pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])))

    return put


@cache
def make_norm_rows(kind: str, dtype: str, threads: int = 0) -> Callable[..., Any]:
    """kernel(x, gain, shift, has_shift, eps, out)[T, threads]: the norm by itself, x float32 [T, D] -> 16 bits.
    threads: for D <= 8 * threads, a row in registers; 0: any D, read twice."""
    norm = make_norm(kind, dtype, True, True)
    ask, ask_x = make_ask(1, threads)
    norm_held = make_norm_held(kind, dtype, 1, threads, True)

    @early()
    @cuda.jit
    def norm_rows(x, gain, shift, has_shift, eps, out):
        if threads > 0:
            held = cuda.local.array(24, types.float32)
            ask(held, x.shape[1], gain, shift, has_shift)
        ptx.take_turn()
        if threads > 0:
            ask_x(held, x, cuda.blockIdx.x)
            norm_held(held, x.shape[1], eps, out, cuda.blockIdx.x * x.shape[1])
        else:
            norm(x, gain, shift, has_shift, eps, out, x.shape[1])

    return norm_rows


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for kind in NORMS:
        for dtype in ("fp16", "bf16"):
            out = array_type(dtype, 2)
            for threads in (0, 224):
                kernel = make_norm_rows(kind, dtype, threads)
                yield f"{kind}_rows_{dtype}_{threads}", kernel, (F32_2D, F32_1D, F32_1D, types.boolean, types.float32, out)


@cache
def make_norm(kind: str, dtype: str, together: bool, alone: bool = False) -> Callable[..., Any]:
    """norm(x, gain, shift, has_shift, eps, out, pitch) by the whole block, D a multiple of 8; ends with a barrier.

    together    the block works on one token, the only one; otherwise each warp on tokens of its own
    alone       block t on token t, and `out` is the 16-bit [T, D] in global memory: the norm as a launch of its own
    """
    centred = kind == "layernorm"
    put = make_put_global(dtype) if alone else make_put(dtype)

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
            first_token, token_step = 0, num_tokens
        if alone:
            first_token = cuda.blockIdx.x
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
