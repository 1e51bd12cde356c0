"""What a GeMM of the step kernel reads besides weights: x, in 16 bits, into shared memory of every block.

    x in 16 bits [T, K] -> numbers k0 .. k1 of each row, padded with zeros to a multiple of 64
    x float32 [T, K]    -> the norm of each row (all of K), made again by every block, rounded to 16 bits, padded

Rows in shared memory are `pitch` bytes apart, 64 beyond a multiple of 128, so that lanes that read the rows of two
tokens at the same time meet different banks. Reads 2*T*K (norm: 4*T*K, twice for T > 1) bytes from L2 in each block.
Loads are asked for several at a time before the first is used: each is a trip of some 600 cycles to L2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import feed_ptx, groups
from l1_kernels.cuda_api import cuda, math
from l1_kernels.sbi_gemm.words import ZERO_WORDS, ZEROS4, make_pack
from l1_kernels.step.program import EPS, GAIN, SHIFT, SOURCE, K, X
from l1_kernels.step.together import make_together

ZERO, ONE = np.float32(0), np.float32(1)
AHEAD = 8  # loads of 16 bytes that a thread has under way
QUARTERS = 4  # of a row of one token, float32x4 a thread each: a norm takes K up to 16 * threads
PADDED = 64  # numbers
reduce_sum, lane_index, warp_index = groups.reduce_sum, groups.lane, groups.warp


def pitch_of(numbers: int) -> int:
    """Bytes from row to row in shared memory; `numbers` is a multiple of 64."""
    return numbers * 2 + 64


def longest_norm(warps: int) -> int:
    return QUARTERS * 4 * 32 * warps


@cache
def make_load_x(dtype: str, warps: int) -> Callable[..., Any]:
    """load_x(desc, row, source, k0, k1, num_tokens, to, pitch): numbers k0..k1 of the source's x to the shared address
    to + t * pitch."""
    threads = warps * 32
    held = AHEAD * 4

    @cuda.jit(device=True)
    def load_x(desc, row, source, k0, k1, num_tokens, to, pitch):
        size = np.int32(desc[row + K + source * SOURCE])
        address = desc[row + X + source * SOURCE] + np.int64(k0) * 2
        pieces = np.int32(np.int32(k1 - k0) >> 3)
        padded = np.int32(np.int32(pieces + 7) >> 3 << 3)
        total = np.int32(padded * num_tokens)
        words = cuda.local.array(held, types.uint32)
        begin = np.int32(cuda.threadIdx.x)
        while begin < total:
            for u in range(AHEAD):
                item = np.int32(begin + u * threads)
                t = np.int32(np.uint32(item) // np.uint32(padded))
                piece = np.int32(item - t * padded)
                v = ZERO_WORDS
                if item < total and piece < pieces:
                    v = feed_ptx.load16_at(address + np.int64(t * size + piece * 8) * 2)
                words[u * 4], words[u * 4 + 1], words[u * 4 + 2], words[u * 4 + 3] = v[0], v[1], v[2], v[3]
            for u in range(AHEAD):
                item = np.int32(begin + u * threads)
                t = np.int32(np.uint32(item) // np.uint32(padded))
                piece = np.int32(item - t * padded)
                if item < total:
                    v = (words[u * 4], words[u * 4 + 1], words[u * 4 + 2], words[u * 4 + 3])
                    feed_ptx.store16_shared_at(np.uint32(to + t * pitch + piece * 16), v)
            begin = np.int32(begin + threads * AHEAD)

    return load_x


@cache
def make_norm(kind: str, dtype: str, warps: int) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(ask, norm_one, norm_many): norm(x), LayerNorm or RMSNorm, of all rows of source 0, to shared memory from address `to`.

    ask(desc, row, gains, shifts)                       for one token, before x is known
    norm_one(desc, row, gains, shifts, to)              one token
    norm_many(desc, row, num_tokens, to, pitch)         several"""
    centred = kind == "layernorm"
    pack = make_pack("bf16" if dtype == "bf16" else "fp16")
    threads = warps * 32
    num_held = QUARTERS * 4
    meet, _ = make_together(warps)
    load = feed_ptx.load16_floats_at

    @cuda.jit(device=True, forceinline=True)
    def put(to, a, b, c, d):
        feed_ptx.store8_shared_at(np.uint32(to), (pack(a, b), pack(c, d)))

    @cuda.jit(device=True, forceinline=True)
    def all_sum(value, sums, first):
        """Over the workers of the block; sums[first:] has a place a warp and is not in use by an earlier call."""
        value = reduce_sum(value)
        if lane_index() == 0:
            sums[first + warp_index()] = value
        meet()
        return reduce_sum(sums[first + lane_index()] if lane_index() < warps else ZERO)

    @cuda.jit(device=True, forceinline=True)
    def ask(desc, row, gains, shifts):
        """The norm's vectors, which wait for nobody, as norm_one wants them: QUARTERS * 4 numbers a thread."""
        size = np.int32(desc[row + K])
        gain, shift = desc[row + GAIN], desc[row + SHIFT]
        for q in range(QUARTERS):
            k = np.int32((cuda.threadIdx.x + q * threads) * 4)
            g, s = ZEROS4, ZEROS4
            if k < size:
                g = load(gain + np.int64(k) * 4)
                if shift:
                    s = load(shift + np.int64(k) * 4)
            for i in range(4):
                gains[q * 4 + i], shifts[q * 4 + i] = g[i], s[i]

    @cuda.jit(device=True, forceinline=True)
    def norm_one(desc, row, gains, shifts, to):
        """One token: the whole block on it, x in registers, the variance from differences."""
        sums = cuda.shared.array(64, types.float32)
        x, size = desc[row + X], np.int32(desc[row + K])
        eps = np.int32(desc[row + EPS]).view(np.float32)
        held = cuda.local.array(num_held, types.float32)
        for q in range(QUARTERS):
            k = np.int32((cuda.threadIdx.x + q * threads) * 4)
            v = ZEROS4
            if k < size:
                v = load(x + np.int64(k) * 4)
            for i in range(4):
                held[q * 4 + i] = v[i]
        count = np.float32(size)
        mean = ZERO
        if centred:
            total = ZERO
            for i in range(num_held):
                total += held[i]
            mean = all_sum(total, sums, 0) / count
        squares = ZERO
        for q in range(QUARTERS):
            if (cuda.threadIdx.x + q * threads) * 4 < size:
                for i in range(4):
                    held[q * 4 + i] -= mean
                    squares += held[q * 4 + i] * held[q * 4 + i]
        factor = ONE / math.sqrt(all_sum(squares, sums, 32) / count + eps)
        padded = np.int32(np.int32(size + PADDED - 1) // PADDED * PADDED)
        for q in range(QUARTERS):
            k = np.int32((cuda.threadIdx.x + q * threads) * 4)
            j = q * 4
            if k < padded:  # beyond the row gains and shifts are 0
                put(
                    to + k * 2,
                    held[j] * factor * gains[j] + shifts[j], held[j + 1] * factor * gains[j + 1] + shifts[j + 1],
                    held[j + 2] * factor * gains[j + 2] + shifts[j + 2], held[j + 3] * factor * gains[j + 3] + shifts[j + 3],
                )  # fmt: skip

    @cuda.jit(device=True)
    def norm_many(desc, row, num_tokens, to, pitch):
        """A warp a token: sums of x - c and its square, c the mean of the first numbers, then the row once more."""
        x, size = desc[row + X], np.int32(desc[row + K])
        gain, shift = desc[row + GAIN], desc[row + SHIFT]
        eps = np.int32(desc[row + EPS]).view(np.float32)
        count = np.float32(size)
        held = cuda.local.array(num_held, types.float32)
        padded = (size + PADDED - 1) // PADDED * PADDED
        for t in range(warp_index(), num_tokens, warps):
            base = x + np.int64(t * size) * 4
            guess = ZERO
            if centred:
                v = load(base + (lane_index() * 16 if lane_index() * 4 < size else 0))
                guess = reduce_sum((v[0] + v[1]) + (v[2] + v[3])) * np.float32(1 / 128)
            total, squares = ZERO, ZERO
            for begin in range(lane_index() * 4, size, 128 * QUARTERS):
                for q in range(QUARTERS):
                    v = (guess, guess, guess, guess)
                    if begin + q * 128 < size:
                        v = load(base + (begin + q * 128) * 4)
                    for i in range(4):
                        held[q * 4 + i] = v[i]
                for i in range(num_held):
                    off = held[i] - guess
                    total += off
                    squares += off * off
            total, squares = reduce_sum(total), reduce_sum(squares)
            off = total / count if centred else ZERO
            mean = guess + off
            factor = ONE / math.sqrt(max(squares / count - off * off, ZERO) + eps)
            for begin in range(lane_index() * 4, padded, 128 * 2):
                for q in range(2):
                    k = begin + q * 128
                    if k < padded:
                        a, b, c, d = ZERO, ZERO, ZERO, ZERO
                        if k < size:
                            v, g, s = load(base + k * 4), load(gain + k * 4), ZEROS4
                            if shift:
                                s = load(shift + k * 4)
                            a, b = (v[0] - mean) * factor * g[0] + s[0], (v[1] - mean) * factor * g[1] + s[1]
                            c, d = (v[2] - mean) * factor * g[2] + s[2], (v[3] - mean) * factor * g[3] + s[3]
                        put(to + t * pitch + k * 2, a, b, c, d)

    return ask, norm_one, norm_many
