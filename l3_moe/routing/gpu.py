"""experts, share = the gate's softmax and top k;   slots, sources, offsets = the pairs' places, expert by expert and in token order;
rows[slots[t, j]] = x[t]

One launch from logits [P, T, E] float32 (P parts that are added: product.py leaves its sums so) to the tables of l3_moe/tables.py and,
where it is asked for, to the rows that the experts read: of the layer's transformations all but the last (paper, Section V-C). Arrays in
global memory. Reads 4 P T E bytes and writes 16 T k + 4 (E + 1) + 4; rows of D numbers read 4 T D and write b T k D more, of b bytes each.
O(T k) operations beside the T E k comparisons: the tables are bound by latency, the rows by bytes.

    block b   -> a stretch of tokens; of few tokens there is one block, and no barrier
    choose       a warp a token (top_k.py)
    rank         warp 0 goes through the block's pairs in order, 32 at a time: a pair's rank among those of its expert, and in the end
                 the block's pairs by expert, its row of `histogram`
    barrier      over the grid (groups.grid_sync), while a first part of the rows is on its way to registers
    sum          every block adds up the histogram's rows by itself: those before its own say where its pairs begin within an expert, and an
                 exclusive scan over all of them where the experts begin
    place        slot = start of the expert + pairs of earlier blocks + rank, and its inverse
    copy         a warp a segment of a token's row, to k places

Every block reads the whole histogram, 4 B E bytes of B blocks, out of L2. All blocks must run at once: the launcher starts no more than
there are multiprocessors, and two find room on one, so that another stream's kernel that holds some of them (NCCL's, which may wait for a peer)
does not keep a block out. The barrier's counter goes on from launch to launch, so a graph needs no memset.

A NaN counts as minus infinity, so that every index is in range, and in a sum over all E as itself. The launcher rejects what
check.py does, E > 512, k > 16, T > 65536. T = 0 writes offsets and `dropped`, zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, I32_1D, I32_2D, array_type
from l1_kernels.cuda_api import cuda, early
from l3_moe.routing.layout import SEGMENT, make_segment_copy
from l3_moe.routing.top_k import ALL, make_choose, parts_at_once

MAX_EXPERTS, MAX_TOP_K = 512, 16
ONE_BLOCK, TOKENS, BLOCKS = 32, 8, 128  # up to so many tokens one block; beyond, so many tokens a block, until there are BLOCKS blocks
ONE_BLOCK_ROWS = 8  # the same where rows are copied too; beyond, one token a block
ONE_PART, GIVEN = 0, -1  # what the choice is made of
AHEAD = 8  # loads of the histogram on their way
num_held = 4 * AHEAD
RANK = 1024  # a pair's place in its block: rank * RANK + expert
NOBODY = np.int32(-1)
reduce_sum, exclusive_scan, lane_index = groups.reduce_sum, groups.exclusive_scan, groups.lane


def warps_of(pieces: int) -> int:
    """Warps of a block at most: a lane that holds many logits needs the registers of two."""
    return 16 if pieces < 16 else 8


def pieces_of(num_experts: int) -> int:
    """The least power of two that 32 lanes can hold the experts with."""
    return 1 << max(0, (num_experts - 1) // 32).bit_length()


@cuda.jit(device=True, forceinline=True)
def rank_pairs(places, count, counts):
    """Warp 0: places[i], an expert or NOBODY, becomes rank * RANK + expert; counts[e] goes from 0 to the number of e's pairs."""
    lane = lane_index()
    for start in range(0, count, 32):
        i = start + lane
        expert = places[i] if i < count else NOBODY
        alike = np.uint32(cuda.match_any_sync(ALL, expert))
        below = cuda.popc(alike & np.uint32((1 << lane) - 1))
        seen = np.int32(0)
        if expert >= 0:
            seen = counts[expert]
            places[i] = (seen + below) * RANK + expert
        groups.sync()  # all have read before one writes
        if expert >= 0 and below == 0:
            counts[expert] = seen + cuda.popc(alike)
        groups.sync()


@cache
def make_sum_histogram(pieces: int) -> Callable[..., Any]:
    """sum_histogram(histogram, scratch, before, totals): the rows of all blocks, and of those before this one. `rows` of them side by side,
    16 bytes to a thread, AHEAD times on their way. scratch: int32 [8 * threads], shared, at a multiple of 16 bytes."""
    num_slots, threads = 32 * pieces, 32 * warps_of(pieces)
    lanes = num_slots // 4  # of a row
    rows, half, slots_a_thread = threads // lanes, 4 * threads, -(-num_slots // threads)

    @cuda.jit(device=True, forceinline=True)
    def sum_histogram(histogram, scratch, before, totals):
        held = cuda.local.array(num_held, types.uint32)
        thread, blocks = cuda.threadIdx.x, cuda.gridDim.x
        row, e = thread // lanes, thread % lanes * 4
        a, b, c, d = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)  # of all
        f, g, h, i = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)  # of earlier ones
        start = row
        while start < blocks:
            for u in range(AHEAD):
                words = ptx.load16(histogram, min(start + u * rows, blocks - 1) * num_slots + e)
                held[4 * u], held[4 * u + 1], held[4 * u + 2], held[4 * u + 3] = words
            for u in range(AHEAD):
                if start + u * rows < blocks:
                    a, b, c, d = a + held[4 * u], b + held[4 * u + 1], c + held[4 * u + 2], d + held[4 * u + 3]
                if start + u * rows < cuda.blockIdx.x:
                    f, g, h, i = f + held[4 * u], g + held[4 * u + 1], h + held[4 * u + 2], i + held[4 * u + 3]
            start += AHEAD * rows
        ptx.store16_shared(scratch, 4 * thread, (a, b, c, d))
        ptx.store16_shared(scratch, half + 4 * thread, (f, g, h, i))
        cuda.syncthreads()
        for u in range(slots_a_thread):
            slot = thread + u * threads
            if slot >= num_slots:
                break
            total, earlier = np.int32(0), np.int32(0)
            for r in range(cuda.blockDim.x // lanes):  # `rows`, but the compiler would write all of them out
                total += scratch[r * num_slots + slot]
                earlier += scratch[half + r * num_slots + slot]
            totals[slot], before[slot] = total, earlier

    return sum_histogram


@cuda.jit(device=True, forceinline=True)
def carried(token, segment, num_segments):
    """(token, segment) with a segment below num_segments; no division, which is a function of a hundred instructions."""
    while segment >= num_segments:
        segment -= num_segments
        token += 1
    return token, segment


@cache
def make_find_starts(pieces: int) -> Callable[..., Any]:
    """find_starts(totals, capacity, starts, dropped): warp 0: starts[e] = the rows of the experts before e, of all E at the end."""

    @cuda.jit(device=True, forceinline=True)
    def find_starts(totals, capacity, starts, dropped):
        first = lane_index() * pieces
        kept, lost = np.int32(0), np.int32(0)
        for i in range(pieces):
            total = totals[first + i]
            kept += min(total, capacity)
            lost += total - min(total, capacity)
        start = exclusive_scan(kept)
        for i in range(pieces):
            starts[first + i] = start
            start += min(totals[first + i], capacity)
        lost = reduce_sum(lost)
        if lane_index() == 31:
            starts[32 * pieces] = start
            if cuda.blockIdx.x == 0:
                dropped[0] = lost

    return find_starts


@cache
def make_tables(pieces: int, source: int, dtype: str | None = None) -> Callable[..., Any]:
    """kernel(logits, num_parts, pitch, over_all, capacity, num_tokens, top_k, stretch, counter, histogram, experts, share, slots, sources,
    offsets, dropped, x, rows)[B, 32 * warps_of(pieces), stream, 4 * k * stretch] for 32 * pieces experts at most. experts, share, slots and
    sources are flat, [T * k].

    source: ONE_PART: logits [T, pitch], flat; GIVEN: `experts` is there, and logits, over_all and share are not looked at; otherwise
        logits [num_parts, T, pitch], flat, so many parts at a time (top_k.parts_at_once)
    dtype: of the rows that x [T, D] is dispatched to (layout.py), D a multiple of 8; None: there are none, and x, rows are not looked at
    stretch: tokens of a block. counter: groups.grid_sync's. histogram: int32 [B, 32 * pieces], scratch"""
    num_slots, num_starts, num_held_x = 32 * pieces, 32 * pieces + 1, SEGMENT // 32
    warps, threads, scratch_size = warps_of(pieces), 32 * warps_of(pieces), 256 * warps_of(pieces)
    each = -(-num_starts // threads)  # of the experts, and one more, to a thread
    given, has_rows = source == GIVEN, dtype is not None
    choose, find_starts, sum_histogram = make_choose(pieces, max(0, source)), make_find_starts(pieces), make_sum_histogram(pieces)
    ask, put = make_segment_copy(dtype or "fp32")

    @early()
    @cuda.jit(launch_bounds=(threads, 2))
    def tables(
        logits, num_parts, pitch, over_all, capacity, num_tokens, top_k, stretch, counter, histogram, experts, share, slots, sources,
        offsets, dropped, x, rows
    ):  # fmt: skip
        # Loops over experts run as often as the compiler knows: numba's range from a thread on costs a hundred instructions to begin.
        counts = cuda.shared.array(num_slots, types.int32)
        before = cuda.shared.array(num_slots, types.int32)
        totals = cuda.shared.array(num_slots, types.int32)
        starts = cuda.shared.array(num_starts, types.int32)
        scratch = cuda.shared.array(scratch_size, types.int32, alignment=16)
        places = cuda.shared.array(0, types.int32)
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        warp = thread >> 5
        num_experts = offsets.shape[0] - 1
        first = block * stretch
        tokens_here = max(0, min(stretch, num_tokens - first))
        count, first_pair = tokens_here * top_k, first * top_k
        ptx.take_turn()
        for u in range(each):
            if thread + u * threads < num_slots:
                counts[thread + u * threads] = before[thread + u * threads] = 0
        if given:
            i = thread
            while i < count:
                expert = experts[first_pair + i]
                places[i] = expert if 0 <= expert and expert < num_experts else NOBODY
                i += threads
        else:
            t = warp
            while t < tokens_here:
                choose(
                    logits, num_parts, num_tokens * pitch, pitch, first + t, num_experts, top_k, over_all, experts, share, places, t * top_k
                )  # fmt: skip
                t += warps
        cuda.syncthreads()
        if warp == 0:
            rank_pairs(places, count, counts)
        cuda.syncthreads()
        if has_rows:  # a warp's first segment is on its way while blocks wait for each other; warp 0's would hold up its release
            held = cuda.local.array(num_held_x, types.float32)
            num_segments = (x.shape[1] + SEGMENT - 1) // SEGMENT
            token, segment = carried(0, warp, num_segments)
            if warp > 0 and token < tokens_here:
                ask(held, x, first + token, segment)
        if cuda.gridDim.x > 1:
            for u in range(each):
                if thread + u * threads < num_slots:
                    histogram[block, thread + u * threads] = counts[thread + u * threads]
            groups.grid_sync(counter)
            sum_histogram(histogram, scratch, before, totals)
        else:
            for u in range(each):
                if thread + u * threads < num_slots:
                    totals[thread + u * threads] = counts[thread + u * threads]
        cuda.syncthreads()
        if warp == 0:
            find_starts(totals, capacity, starts, dropped)
        cuda.syncthreads()
        i = thread
        while i < count:
            place, slot = places[i], NOBODY
            if place >= 0:
                expert = place % RANK
                within = before[expert] + place // RANK
                if within < capacity:
                    slot = starts[expert] + within
                    sources[slot] = first_pair + i
            slots[first_pair + i] = slot
            places[i] = slot
            i += threads
        i = starts[num_slots] + block * threads + thread
        while i < num_tokens * top_k:
            sources[i] = NOBODY
            i += cuda.gridDim.x * threads
        if block == 0:
            for u in range(each):
                if thread + u * threads <= num_experts:
                    offsets[thread + u * threads] = starts[thread + u * threads]
        if has_rows:
            if warp == 0 and token < tokens_here:
                ask(held, x, first + token, segment)
            cuda.syncthreads()
            while token < tokens_here:
                put(held, rows, places, token * top_k, top_k, segment)
                token, segment = carried(token, segment + warps, num_segments)
                if token < tokens_here:
                    ask(held, x, first + token, segment)

    return tables


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    numbers = (types.int64, types.int64, types.boolean, types.int32, types.int64, types.int64, types.int64)
    tables = (F32_1D, *numbers, I32_1D, I32_2D, I32_1D, F32_1D, I32_1D, I32_1D, I32_1D, I32_1D, F32_2D)
    for pieces in (1, 2, 4, 8, 16):
        yield f"tables_{32 * pieces}", make_tables(pieces, ONE_PART), (*tables, F32_2D)
        many = parts_at_once(pieces, 16)
        yield f"tables_{32 * pieces}_parts_fp16", make_tables(pieces, many, "fp16"), (*tables, array_type("fp16", 2))
    for pieces in (1, 16):
        yield f"tables_{32 * pieces}_given", make_tables(pieces, GIVEN), (*tables, F32_2D)
    for dtype in ("fp32", "bf16"):
        yield f"tables_128_4_parts_{dtype}", make_tables(4, 4, dtype), (*tables, array_type(dtype, 2))
