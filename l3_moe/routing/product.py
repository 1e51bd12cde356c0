"""logits[p, t, e] = sum over the k of part p of x[t, k] * gate[e, k]

The gate's product, as exact as float32 and on the tensor cores: x float32 [T, D], gate float32 [E, D], logits float32 [P, T, E], all in
global memory. P parts of D, which gpu.py adds when it reads them: T and E alone would not give every multiprocessor a tile.

A float32 is two fp16, a = a1 + a2 with a1 = a rounded and a2 what that left, 22 bits of 24; and x w = x1 w1 + x1 w2 + x2 w1 to 2^-22 of
it, each product exact and summed in float32. So 6 T E D operations at the tensor cores' rate, where float32's own units, a fifteenth as
fast, would do 2 T E D. Past 65504 a number becomes infinity: x comes from a norm, which keeps it below sqrt(D) times its gain. The gate is
multiplied by SCALE on the way, a power of two, so that what is left of its small numbers is no denormal.

Reads 4 T D (E / 128) + 4 E D (T / tile) bytes, out of L2 beyond the first time, and writes 4 P T E: bound by L2 and by the
splitting, which every warp does for itself.

    block (tile of tokens, 128 experts, part)    8 warps: 32 tokens x 8 NT experts each, side by side `across` the experts
    stage     32 numbers of k of all its rows in shared memory, STAGES of them on their way (cp.async). The gate's first ones are asked for
              before the launch's turn: nobody writes them
    16 bytes  of a row are one lane's share of 16 k: two pairs, the one for each half of the tensor core's k. In which order k is summed is
              all the same, so x and gate need only agree. Rows swap halves in turn, and eight lanes meet 32 banks

The launcher rejects D that is no multiple of 32, and misaligned arrays. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_2D, F32_3D
from l1_kernels.cuda_api import cuda, early

WARPS, THREADS = 8, 256
EXPERTS = 128  # of a block
K, STAGES = 32, 4  # of a stage; stages in shared memory
PER_ROW = K // 4  # pieces of 16 bytes of a row of a stage
RUN = THREADS // PER_ROW  # rows that the block's threads fetch at once
PARTS, MOST_PARTS = 16, 32
SCALE = 64
ZERO, UP, DOWN = np.float32(0), np.float32(SCALE), np.float32(1 / SCALE)
ALL = groups.ALL_LANES
lane_index, warp_index = groups.lane, groups.warp


def tokens_of(across: int) -> int:
    """Tokens of a block whose warps stand `across` by WARPS / across."""
    return 32 * (WARPS // across)


def shared_bytes(across: int) -> int:
    return STAGES * (tokens_of(across) + EXPERTS) * K * 4


@cuda.jit(device=True, forceinline=True)
def place(row, piece):
    """Where a piece of 16 bytes lies in a stage, in floats."""
    return row * K + ((piece ^ ((row & 1) << 2)) << 2)


@cuda.jit(device=True, forceinline=True)
def split(low, high):
    """Two float32 -> two pairs of fp16: rounded, and what is left."""
    rounded = ptx.f32x2_to_f16x2(low, high)
    a, b = ptx.f16x2_to_f32x2(rounded)
    return rounded, ptx.f32x2_to_f16x2(low - a, high - b)


@cuda.jit(device=True, forceinline=True)
def split_four(shared, at, factor):
    """16 bytes of shared memory: (first pair, second pair) rounded, and what is left of them."""
    words = ptx.load16_shared(shared, at)
    a, b = words[0].view(np.float32) * factor, words[1].view(np.float32) * factor
    c, d = words[2].view(np.float32) * factor, words[3].view(np.float32) * factor
    first, first_left = split(a, b)
    second, second_left = split(c, d)
    return first, second, first_left, second_left


@cache
def make_product(across: int) -> Callable[..., Any]:
    """kernel(x, gate, chunk, logits)[(T / tokens_of(across), E / EXPERTS, P), THREADS, stream, shared_bytes(across)], quotients rounded up.
    chunk: numbers of k of a part, a multiple of K; a part beyond D is zeros. logits [P, T, E or more], a multiple of 4; beyond E it holds
    copies of the last expert's."""
    tokens = tokens_of(across)
    tiles = EXPERTS // (8 * across)  # of 8 experts, of a warp
    rows = tokens + EXPERTS
    num_sums, num_stage = 2 * tiles * 4, rows * K
    x_times, gate_times = tokens // RUN, EXPERTS // RUN
    one = np.float32(1)

    @cuda.jit(device=True, forceinline=True)
    def fetch(shared, source, first_row, first_place, times, k, stage):
        """Asks for RUN * times rows of a stage; those past the last are the last, and nobody looks at them."""
        row, piece = cuda.threadIdx.x // PER_ROW, cuda.threadIdx.x % PER_ROW
        last = source.shape[0] - 1
        for i in range(times):
            at = np.int64(min(first_row + row + i * RUN, last)) * source.shape[1] + k + piece * 4
            ptx.copy_async16(shared, stage * num_stage + place(first_place + row + i * RUN, piece), source, at)

    @cuda.jit(device=True, forceinline=True)
    def fetch_gate(shared, gate, first_expert, k, stage):
        fetch(shared, gate, first_expert, tokens, gate_times, k, stage)

    @cuda.jit(device=True, forceinline=True)
    def fetch_x(shared, x, first_token, k, stage):
        fetch(shared, x, first_token, 0, x_times, k, stage)

    @cuda.jit(device=True, forceinline=True)
    def multiply(sums, shared, first_row, first_column):
        """16 of a stage's k for the warp's 32 tokens and 8 * tiles experts."""
        g, t = lane_index() >> 2, lane_index() & 3
        a = cuda.local.array(16, types.uint32)
        for half in range(K // 16):
            piece = half * 4 + t
            for m in range(2):
                row = first_row + m * 16 + g
                a[m * 8], a[m * 8 + 2], a[m * 8 + 4], a[m * 8 + 6] = split_four(shared, place(row, piece), one)
                a[m * 8 + 1], a[m * 8 + 3], a[m * 8 + 5], a[m * 8 + 7] = split_four(shared, place(row + 8, piece), one)
            for n in range(tiles):
                b0, b1, c0, c1 = split_four(shared, place(first_column + n * 8 + g, piece), UP)
                for m in range(2):
                    i, s = m * 8, (n * 2 + m) * 4
                    whole, left = (a[i], a[i + 1], a[i + 2], a[i + 3]), (a[i + 4], a[i + 5], a[i + 6], a[i + 7])
                    total = (sums[s], sums[s + 1], sums[s + 2], sums[s + 3])
                    total = ptx.mma_f16(whole, (c0, c1), total)
                    total = ptx.mma_f16(left, (b0, b1), total)
                    total = ptx.mma_f16(whole, (b0, b1), total)
                    sums[s], sums[s + 1], sums[s + 2], sums[s + 3] = total

    @cuda.jit(device=True, forceinline=True)
    def write(sums, logits, part, first_token, first_expert):
        """A lane has two neighbours of row g and two of row g + 8 of a tile; with the lane beside it four of one row, 16 bytes."""
        lane = lane_index()
        odd = lane & 1
        pitch = logits.shape[2]
        first_row = first_token + (lane >> 2) + 8 * odd
        first_column = first_expert + ((lane & 3) >> 1) * 4
        for m in range(2):
            row = first_row + m * 16
            start = (np.int64(part) * logits.shape[1] + row) * pitch
            for n in range(tiles):
                s = (n * 2 + m) * 4
                a, b, c, d = sums[s] * DOWN, sums[s + 1] * DOWN, sums[s + 2] * DOWN, sums[s + 3] * DOWN
                e = cuda.shfl_xor_sync(ALL, a if odd else c, 1)
                f = cuda.shfl_xor_sync(ALL, b if odd else d, 1)
                column = first_column + n * 8
                if row < logits.shape[1] and column < pitch:
                    ptx.store16_floats(logits, start + column, (e, f, c, d) if odd else (a, b, e, f))

    @early()
    @cuda.jit(launch_bounds=(THREADS, 1))
    def product(x, gate, chunk, logits):
        shared = cuda.shared.array(0, types.float32)
        sums = cuda.local.array(num_sums, types.float32)
        first_token, first_expert, part = cuda.blockIdx.x * tokens, cuda.blockIdx.y * EXPERTS, cuda.blockIdx.z
        first_k = part * chunk
        num_stages = (min(chunk, x.shape[1] - first_k)) // K
        for s in range(STAGES - 1):
            if s < num_stages:
                fetch_gate(shared, gate, first_expert, first_k + s * K, s)
        ptx.take_turn()
        for s in range(STAGES - 1):
            if s < num_stages:
                fetch_x(shared, x, first_token, first_k + s * K, s)
            ptx.commit_async()  # one group a stage, empty or not
        for i in range(num_sums):
            sums[i] = ZERO
        my_row = (warp_index() // across) * 32
        my_column = (warp_index() % across) * tiles * 8
        for s in range(num_stages):
            ptx.wait_async(2)
            cuda.syncthreads()  # everybody's part of this stage is there, and everybody has left the one whose place the next fetch takes
            ahead = s + STAGES - 1
            if ahead < num_stages:
                stage = ahead % STAGES
                fetch_gate(shared, gate, first_expert, first_k + ahead * K, stage)
                fetch_x(shared, x, first_token, first_k + ahead * K, stage)
            ptx.commit_async()
            base = (s % STAGES) * rows
            multiply(sums, shared, base + my_row, base + tokens + my_column)
        write(sums, logits, part, first_token + my_row, first_expert + my_column)

    return product


def takes(size: int) -> bool:
    return size % K == 0 and size > 0


def plan(num_tokens: int, num_experts: int, size: int, multiprocessors: int) -> tuple[int, tuple[int, int, int], int]:
    """(across, grid, chunk): the largest tile of tokens that, with at most PARTS parts, gives four of five multiprocessors a block; then as
    many parts as they want, a multiple of 4 (the tables read several at a time), of which the last may be empty. Of few tokens some
    multiprocessors go without: each part costs the tables a read."""
    across = 2
    while across < WARPS and tiles_of(num_tokens, num_experts, across) * PARTS * 5 < multiprocessors * 4:
        across *= 2
    tiles = tiles_of(num_tokens, num_experts, across)
    parts = max(1, min(MOST_PARTS, multiprocessors // max(1, tiles), size // K))
    parts -= parts % 4 if parts > 4 else 0
    chunk = -(-size // (K * parts)) * K
    return across, (-(-num_tokens // tokens_of(across)), -(-num_experts // EXPERTS), parts), chunk


def tiles_of(num_tokens: int, num_experts: int, across: int) -> int:
    return -(-num_tokens // tokens_of(across)) * -(-num_experts // EXPERTS)


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for across in (2, 4, 8):
        yield f"gate_{tokens_of(across)}_tokens", make_product(across), (F32_2D, F32_2D, types.int64, F32_3D)
