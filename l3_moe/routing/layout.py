"""dispatch: rows[slots[t, j], d] = x[t, d];   combine: residual[t, d] += sum over j of share[t, j] * y[slots[t, j], d]

The two layout transformations (paper, Section V-C). x, y, residual float32, rows in the carrier of their dtype, all in global memory.
Bytes of T tokens, k choices, D numbers: dispatch reads 4 T D and writes b T k D of b bytes each (an x is read once, however many experts
its token visits); combine reads 4 T k D + 4 T D and writes 4 T D. Neither computes anything to speak of: bound by bytes.

    block (t, part)   one token; thread i of its part 8 numbers of x, or 4 where float32 is written or read: accesses of 16 bytes
    combine           a thread asks for its part of all k rows before it adds the first, and adds in the order of j

A width that 16 bytes do not divide, or a misaligned array, goes number by number. A pair with no row is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_2D, FLOATS, I32_2D, array_type, storer
from l1_kernels.cuda_api import cuda, early

ZERO = np.float32(0)
lane_index = groups.lane
ZEROS4 = (ZERO, ZERO, ZERO, ZERO)
PACK = {"fp16": ptx.f32x2_to_f16x2, "bf16": ptx.f32x2_to_bf16x2}
SEGMENT = 512  # numbers
NUMBERS = {"fp32": 4, "fp16": 8, "bf16": 8}  # a thread's, of 16 bytes of a row


@cache
def make_copy(dtype: str, wide: bool) -> Callable[..., Any]:
    """copy(x, t, d, slots, rows): the NUMBERS from d on of token t, to each of its rows; not `wide`: the one number."""
    if not wide:
        store = storer(dtype)

        @cuda.jit(device=True, forceinline=True)
        def copy(x, t, d, slots, rows):
            number = store(x[t, d])
            for j in range(slots.shape[1]):
                if slots[t, j] >= 0:
                    rows[slots[t, j], d] = number

    elif dtype == "fp32":

        @cuda.jit(device=True, forceinline=True)
        def copy(x, t, d, slots, rows):
            width = np.int64(x.shape[1])
            four = ptx.load16_floats(x, t * width + d)
            for j in range(slots.shape[1]):
                slot = slots[t, j]
                if slot >= 0:
                    ptx.store16_floats(rows, slot * width + d, four)

    else:
        pack = PACK[dtype]

        @cuda.jit(device=True, forceinline=True)
        def copy(x, t, d, slots, rows):
            width = np.int64(x.shape[1])
            a, b = ptx.load16_floats(x, t * width + d), ptx.load16_floats(x, t * width + d + 4)
            words = pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3])
            for j in range(slots.shape[1]):
                slot = slots[t, j]
                if slot >= 0:
                    ptx.store16(rows, slot * width + d, words)

    return copy


@cache
def make_dispatch(dtype: str, wide: bool) -> Callable[..., Any]:
    """kernel(x, slots, rows)[(T, parts), threads]; wide: D is a multiple of NUMBERS, and both arrays lie at multiples of 16 bytes."""
    copy, numbers = make_copy(dtype, wide), NUMBERS[dtype] if wide else 1

    @early()
    @cuda.jit
    def dispatch(x, slots, rows):
        ptx.take_turn()
        d = (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x) * numbers
        if d < x.shape[1]:
            copy(x, cuda.blockIdx.x, d, slots, rows)

    return dispatch


@cache
def make_segment_copy(dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """dispatch in two halves, for a warp and SEGMENT numbers of a token, so that something may happen in between (gpu.py). D is a multiple
    of 8.

    ask(held, x, t, segment)    asks for them: 8 numbers a lane, twice
    put(held, rows, slots, at, top_k, segment)    to the rows slots[at .. at + top_k), in shared memory"""
    hop = 8 * 32
    steps = SEGMENT // hop
    if dtype == "fp32":

        @cuda.jit(device=True, forceinline=True)
        def store(held, i, rows, at):
            ptx.store16_floats(rows, at, (held[i], held[i + 1], held[i + 2], held[i + 3]))
            ptx.store16_floats(rows, at + 4, (held[i + 4], held[i + 5], held[i + 6], held[i + 7]))

    else:
        pack = PACK[dtype]

        @cuda.jit(device=True, forceinline=True)
        def store(held, i, rows, at):
            low, high = pack(held[i], held[i + 1]), pack(held[i + 2], held[i + 3])
            ptx.store16(rows, at, (low, high, pack(held[i + 4], held[i + 5]), pack(held[i + 6], held[i + 7])))

    @cuda.jit(device=True, forceinline=True)
    def ask(held, x, t, segment):
        width = x.shape[1]
        for i in range(steps):
            d = min(segment * SEGMENT + i * hop + lane_index() * 8, width - 8)
            a, b = ptx.load16_floats(x, t * width + d), ptx.load16_floats(x, t * width + d + 4)
            held[8 * i], held[8 * i + 1], held[8 * i + 2], held[8 * i + 3] = a
            held[8 * i + 4], held[8 * i + 5], held[8 * i + 6], held[8 * i + 7] = b

    @cuda.jit(device=True, forceinline=True)
    def put(held, rows, slots, at, top_k, segment):
        width = np.int64(rows.shape[1])
        for j in range(top_k):
            slot = slots[at + j]
            if slot >= 0:
                for i in range(steps):
                    d = segment * SEGMENT + i * hop + lane_index() * 8
                    if d < width:
                        store(held, 8 * i, rows, slot * width + d)

    return ask, put


@cache
def make_combine(top_k: int, wide: bool, add: bool) -> Callable[..., Any]:
    """kernel(y, slots, share, residual)[(T, parts), threads]; add: onto what residual holds; otherwise it is only written."""
    held, step = 4 * top_k, 4 if wide else 1

    if wide:

        @cuda.jit(device=True, forceinline=True)
        def combine_part(y, slots, share, residual, t, d):
            numbers, rows = cuda.local.array(held, types.float32), cuda.local.array(top_k, types.int32)
            width = np.int64(y.shape[1])
            before = ptx.load16_floats(residual, t * width + d) if add else ZEROS4
            for j in range(top_k):
                rows[j] = slots[t, j]
            for j in range(top_k):  # row 0 in the place of one that is not there: no branch holds the next load up
                four = ptx.load16_floats(y, max(rows[j], 0) * width + d)
                numbers[4 * j], numbers[4 * j + 1], numbers[4 * j + 2], numbers[4 * j + 3] = four
            a, b, c, e = ZEROS4
            for j in range(top_k):
                weight = share[t, j]
                if rows[j] >= 0:
                    a += weight * numbers[4 * j]
                    b += weight * numbers[4 * j + 1]
                    c += weight * numbers[4 * j + 2]
                    e += weight * numbers[4 * j + 3]
            ptx.store16_floats(residual, t * width + d, (before[0] + a, before[1] + b, before[2] + c, before[3] + e))

    else:

        @cuda.jit(device=True, forceinline=True)
        def combine_part(y, slots, share, residual, t, d):
            total = ZERO
            for j in range(top_k):
                if slots[t, j] >= 0:
                    total += share[t, j] * y[slots[t, j], d]
            residual[t, d] = residual[t, d] + total if add else total

    @early()
    @cuda.jit
    def combine(y, slots, share, residual):
        ptx.take_turn()
        d = (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x) * step
        if d < y.shape[1]:
            combine_part(y, slots, share, residual, cuda.blockIdx.x, d)

    return combine


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for wide in (True, False):
        kind = "wide" if wide else "narrow"
        for dtype in FLOATS:
            yield f"dispatch_{dtype}_{kind}", make_dispatch(dtype, wide), (F32_2D, I32_2D, array_type(dtype, 2))
        for top_k in (1, 2, 8):
            for add in (True, False):
                yield f"combine_{top_k}_{kind}{'_add' if add else ''}", make_combine(top_k, wide, add), (F32_2D, I32_2D, F32_2D, F32_2D)
