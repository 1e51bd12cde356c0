"""W8A8 for up to 16 tokens: y[t, n] = scale_x[t] * scale[n] * sum_k (low[t, k] + 128 high[t, k]) * w[n, k], in int8 on the tensor cores.

low, high int8 [T, K] and scale_x float32 [T] as quantize/reference.py makes them, w int8 [N, K], scale float32 [N], all in global
memory; both sums are int32 and exact (|sum| <= 127^2 K < 2^31 up to K = 133 000), float32 begins with the scales. Reads N*K bytes
of w once, past L1, and 2 T K bytes of x for each block (16 * GROUPS rows of w), from L2: bound by the weights' bytes.

    mma m16n8k32    A = w (16 rows), B = low or high (8 tokens, COLUMNS of them), C in registers: two products a piece of w
    warp            (group, split): 16 rows of w; of their K every SPLITS-th piece of 64 numbers
    lane (g, t)     of rows g and g + 8 the 16 bytes from k = 16 t: words 2i and 2i + 1 are the halves of mma i (tensor.py says why
                    that is right, if x is read at the same k)

Against tensor.py's int8 (W8A16) no weight becomes fp16: 4 mma for 16 rows * 64 k * 8 tokens, and no other instruction.
Epilogue: scales, bias, activation, gate * up, residual. K a multiple of 16; beyond a row's end nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, array_type
from l1_kernels.cuda_api import cuda, early
from l1_kernels.quantize.reference import STEP
from l1_kernels.sbi_gemm.job import Job, make_row_of
from l1_kernels.sbi_gemm.tensor import make_end
from l1_kernels.sbi_gemm.words import ZERO_WORDS

PIECE = 64  # numbers of K that a warp takes at a time
PER = 16  # of them a lane, of a row
PLANES = 2  # low and high
INT_ZERO, step_of_high = np.int32(0), np.float32(STEP)
lane_index, warp_index = groups.lane, groups.warp


@dataclass(frozen=True, slots=True)
class Int8Tensor:
    """splits: warps that share 16 rows; groups: of such warps in a block; unroll: pieces in flight; columns: tokens / 8, 1 or 2."""

    splits: int = 8
    groups: int = 1
    unroll: int = 2
    columns: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.splits * self.groups

    @property
    def tile(self) -> int:
        """Rows of w in a block."""
        return 16 * self.groups


def plan_of(num_tokens: int, num_out: int, size: int) -> Int8Tensor:
    """More splits where there are few rows, so that the card is full; no more than there are pieces."""
    splits = 8 if num_out >= 4096 or size < 4096 else 16
    while splits > 1 and PIECE * splits > 2 * size:
        splits //= 2
    return Int8Tensor(splits, 1, 2, 2 if num_tokens > 8 else 1)


@cache
def make_int8_tensor(job: Job, plan: Int8Tensor) -> Callable[..., Any]:
    """kernel(low, high, scale_x, w, scale, bias, has_bias, y)[blocks, plan.threads]; of `job` activation, gated and add count.
    y float32 [T, N], or [T, N / 2] where gated."""
    splits, unroll, columns, tile_rows = plan.splits, plan.unroll, plan.columns, plan.tile
    hop, step = PIECE * splits, PIECE * splits * unroll
    num_words, num_x_words = unroll * 2 * 4, unroll * columns * PLANES * 4
    num_sums = PLANES * columns * 4
    items_per_split = (columns * 2 + splits - 1) // splits
    parts_size = num_sums * 32 * splits * plan.groups
    resident = max(1, 16 * 32 // plan.threads)
    gated = job.gated
    row_of, end = make_row_of(gated, 16), make_end(job, False)

    @cuda.jit(device=True, forceinline=True)
    def fetch(words, w, start, start8, k, size, u):
        """Asks for piece u of rows g and g + 8."""
        inside = k + u * hop < size - (lane_index() & 3) * PER
        a = ptx.load16_stream_if(w, start + k + u * hop, inside)
        b = ptx.load16_stream_if(w, start8 + k + u * hop, inside)
        at = u * 8
        words[at], words[at + 1], words[at + 2], words[at + 3] = a[0], a[1], a[2], a[3]
        words[at + 4], words[at + 5], words[at + 6], words[at + 7] = b[0], b[1], b[2], b[3]

    @cuda.jit(device=True, forceinline=True)
    def fetch_x(x_words, low, high, k, size, u):
        """Asks for what piece u meets of both planes, with it: it would cost a wait of its own after it."""
        place = k + u * hop + (lane_index() & 3) * PER
        inside = place < size
        for c in range(columns):
            base = np.int64(min(c * 8 + (lane_index() >> 2), low.shape[0] - 1)) * size
            at = (u * columns + c) * PLANES * 4
            a = ptx.load16(low, base + place) if inside else ZERO_WORDS
            b = ptx.load16(high, base + place) if inside else ZERO_WORDS
            x_words[at], x_words[at + 1], x_words[at + 2], x_words[at + 3] = a[0], a[1], a[2], a[3]
            x_words[at + 4], x_words[at + 5], x_words[at + 6], x_words[at + 7] = b[0], b[1], b[2], b[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply(words, x_words, sums, u):
        for c in range(columns):
            for plane in range(PLANES):
                at = (plane * columns + c) * 4
                here = ((u * columns + c) * PLANES + plane) * 4
                total = (sums[at], sums[at + 1], sums[at + 2], sums[at + 3])
                for half in range(2):
                    i = u * 8 + half * 2
                    a = (words[i], words[i + 4], words[i + 1], words[i + 5])
                    total = ptx.mma_s8(a, (x_words[here + half * 2], x_words[here + half * 2 + 1]), total)
                sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = total[0], total[1], total[2], total[3]

    @early()
    @cuda.jit(launch_bounds=(plan.threads, resident))
    def int8_tensor(low, high, scale_x, w, scale, bias, has_bias, y):
        parts = cuda.shared.array(parts_size, types.int32)
        words = cuda.local.array(num_words, types.uint32)
        x_words = cuda.local.array(num_x_words, types.uint32)
        sums = cuda.local.array(num_sums, types.int32)
        lane, warp = lane_index(), warp_index()
        group = warp // splits
        split = warp - group * splits
        num_tokens = low.shape[0]
        num_rows, size = w.shape
        first_slot = cuda.blockIdx.x * tile_rows + group * 16
        slot = first_slot + (lane >> 2)
        # A row past the last one is the last, read again and not written.
        start = np.int64(min(row_of(slot, num_rows), num_rows - 1)) * size + (lane & 3) * PER
        start8 = np.int64(min(row_of(slot + 8, num_rows), num_rows - 1)) * size + (lane & 3) * PER
        k = split * PIECE
        for u in range(unroll):
            fetch(words, w, start, start8, k, size, u)
        ptx.take_turn()
        for u in range(unroll):
            fetch_x(x_words, low, high, k, size, u)
        for i in range(num_sums):
            sums[i] = INT_ZERO
        more = True
        while more:
            more = k - split * PIECE + step < size
            for u in range(unroll):
                multiply(words, x_words, sums, u)
                if more:  # the place that is free now takes its next piece at once
                    fetch(words, w, start, start8, k + step, size, u)
                    fetch_x(x_words, low, high, k + step, size, u)
            k += step
        base = (group * splits + split) * num_sums * 32 + lane
        for i in range(num_sums):
            parts[base + i * 32] = sums[i]
        cuda.syncthreads()
        for i in range(items_per_split):
            item = i * splits + split  # (column, token of two): the sums of row g and of row g + 8
            if item < columns * 2:
                t = (item >> 1) * 8 + (lane & 3) * 2 + (item & 1)
                if t < num_tokens:
                    at = group * splits * num_sums * 32 + ((item >> 1) * 4 + (item & 1)) * 32 + lane
                    fine, coarse, fine8, coarse8 = INT_ZERO, INT_ZERO, INT_ZERO, INT_ZERO
                    for s in range(splits):
                        here = at + s * num_sums * 32
                        fine += parts[here]
                        fine8 += parts[here + 64]
                        coarse += parts[here + columns * 128]
                        coarse8 += parts[here + columns * 128 + 64]
                    unit = scale_x[t]
                    total = unit * (np.float32(fine) + step_of_high * np.float32(coarse))
                    total8 = unit * (np.float32(fine8) + step_of_high * np.float32(coarse8))
                    end(y, t, slot, total, total8, 0, num_rows, scale, bias, has_bias, bias, False)

    return int8_tensor


def signature() -> tuple[types.Type, ...]:
    number = array_type("int8", 2)
    return (number, number, F32_1D, number, F32_1D, F32_1D, types.boolean, F32_2D)


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for columns in (1, 2):
        plan = Int8Tensor(columns=columns)
        yield f"int8_tensor_plain_{columns}", make_int8_tensor(Job("int8"), plan), signature()
        yield f"int8_tensor_add_{columns}", make_int8_tensor(Job("int8", add=True), plan), signature()
    yield "int8_tensor_activation", make_int8_tensor(Job("int8", activation="gelu_new"), Int8Tensor(16)), signature()
    yield "int8_tensor_gated", make_int8_tensor(Job("int8", activation="silu", gated=True), Int8Tensor()), signature()
