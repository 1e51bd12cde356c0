"""experts, share = the gate's softmax and top k;   slots, sources, offsets = the pairs' places, expert by expert and in token order

One launch from logits [P, T, E] float32 (P parts that are added: a product split over its inner size leaves its sums so) to the
tables of l3_moe/tables.py, all in global memory. Reads 4 P T E bytes once, writes 16 T k + 4 (E + 1) + 4. O(T k) operations beside the
T E k comparisons: bound by latency, not by bytes (paper, Section V-C).

    block b   -> a stretch of tokens; up to ONE_BLOCK tokens there is one block, and no barrier
    choose       a warp a token; lane l holds the logits of experts [l c, (l + 1) c), c = E / 32 rounded up. Round j takes the largest that is left; of
                 equal ones the lowest lane's, so the lowest expert's
    rank         warp 0 goes through the block's pairs in order, 32 at a time: a pair's rank among those of its expert, and in the end
                 the block's pairs by expert, its row of `histogram`
    barrier      over the grid (groups.grid_sync)
    sum          every block adds up the histogram's rows by itself: those before its own say where its pairs begin within an expert, and an
                 exclusive scan over all of them where the experts begin
    place        slot = start of the expert + pairs of earlier blocks + rank, and its inverse

Every block reads the whole histogram, 4 B E bytes of B blocks, out of L2. All blocks must run at once (the launcher starts no more than
there are multiprocessors), and the barrier's counter goes on from launch to launch, so a graph needs no memset.

A NaN counts as minus infinity, so that every index is in range, and in a sum over all E as itself. The launcher rejects what
check.py does, E > 512, k > 16. T = 0 writes offsets and `dropped`, zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_2D, F32_3D, I32_1D, I32_2D, array_type
from l1_kernels.cuda_api import cuda, early, math
from l3_moe.routing.layout import SEGMENT, make_segment_copy

MAX_EXPERTS, MAX_TOP_K = 512, 16
ONE_BLOCK, TOKENS, BLOCKS = 32, 8, 128  # up to so many tokens one block; beyond, so many tokens a block, until there are BLOCKS blocks
ONE_BLOCK_ROWS = 8  # the same where rows are copied too; beyond, one token a block
PARTS = 4  # of a token's logits that are asked for at a time
RANK = 1024  # a pair's place in its block: rank * RANK + expert
NOBODY = np.int32(-1)
ZERO, INFINITY, NAN = np.float32(0), np.float32(np.inf), np.float32(np.nan)
ALL = groups.ALL_LANES
reduce_sum, reduce_max, exclusive_scan, ballot = groups.reduce_sum, groups.reduce_max, groups.exclusive_scan, groups.ballot
lane_index, warp_index, num_warps = groups.lane, groups.warp, groups.num_warps


@cache
def make_load(pieces: int, split: bool) -> Callable[..., Any]:
    """load(logits, t, num_experts, values): this lane's experts of token t; split: of several parts, whose rows begin at multiples of 16 bytes."""
    wide, held_size = pieces % 4 == 0, PARTS * pieces

    @cuda.jit(device=True, forceinline=True)
    def load_part(logits, p, t, first, held, at):
        if wide:
            pitch = logits.shape[2]
            row = (p * logits.shape[1] + t) * pitch
            for i in range(0, pieces, 4):
                four = ptx.load16_floats(logits, row + min(first + i, pitch - 4))
                held[at + i], held[at + i + 1], held[at + i + 2], held[at + i + 3] = four
        else:
            for i in range(pieces):
                held[at + i] = logits[p, t, min(first + i, logits.shape[2] - 1)]

    @cuda.jit(device=True, forceinline=True)
    def load_parts(logits, t, num_experts, values):
        held = cuda.local.array(held_size, types.float32)
        num_parts = logits.shape[0]
        for i in range(pieces):
            values[i] = ZERO
        for p in range(0, num_parts, PARTS):
            for u in range(PARTS):
                load_part(logits, min(p + u, num_parts - 1), t, lane_index() * pieces, held, u * pieces)
            for u in range(PARTS):
                for i in range(pieces):
                    values[i] += held[u * pieces + i] if p + u < num_parts else ZERO

    @cuda.jit(device=True, forceinline=True)
    def load(logits, t, num_experts, values):
        for i in range(pieces):
            values[i] = logits[0, t, min(lane_index() * pieces + i, num_experts - 1)]

    return load_parts if split else load


@cache
def make_choose(pieces: int, split: bool) -> Callable[..., Any]:
    """choose(logits, t, num_experts, over_all, experts, share, places, at): a warp's work for token t; its experts go to places[at ..] too."""
    load = make_load(pieces, split)

    @cuda.jit(device=True, forceinline=True)
    def choose(logits, t, num_experts, over_all, experts, share, places, at):
        values = cuda.local.array(pieces, types.float32)
        lane, top_k = lane_index(), experts.shape[1]
        first = lane * pieces
        load(logits, t, num_experts, values)
        broken = False
        for i in range(pieces):
            inside = first + i < num_experts
            broken = broken or (inside and values[i] != values[i])
            values[i] = values[i] if inside and values[i] > -INFINITY else -INFINITY
        taken, top, total = np.int32(0), ZERO, ZERO
        my_expert, my_weight = np.int32(0), ZERO  # lane j keeps choice j
        for j in range(top_k):
            best, place = -INFINITY, np.int32(-1)
            for i in range(pieces):
                if (taken >> i) & 1 == 0 and (place < 0 or values[i] > best):
                    best, place = values[i], np.int32(i)
            largest = reduce_max(best)
            winner = cuda.ffs(ballot(place >= 0 and best == largest)) - 1
            expert = cuda.shfl_sync(ALL, np.int32(first + place), winner)
            if lane == winner:
                taken |= np.int32(1) << place
            top = largest if j == 0 else top
            weight = math.exp(largest - top)
            total += weight
            if lane == j:
                my_expert, my_weight = expert, weight
        if over_all:
            part = ZERO
            for i in range(pieces):
                part += math.exp(values[i] - top) if first + i < num_experts else ZERO
            total = reduce_sum(NAN if broken else part)
        if lane < top_k:
            experts[t, lane] = my_expert
            share[t, lane] = my_weight / total
            places[at + lane] = my_expert

    return choose


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


@cuda.jit(device=True, forceinline=True)
def sum_histogram(histogram, num_slots, before, totals):
    """before, totals += the rows of earlier blocks, and of all blocks; (row % parts, expert) to a thread."""
    parts = max(1, cuda.blockDim.x // num_slots)
    for item in range(cuda.threadIdx.x, parts * num_slots, cuda.blockDim.x):
        e, part = item % num_slots, item // num_slots
        earlier, total = np.int32(0), np.int32(0)
        for b in range(part, cuda.gridDim.x, parts):
            count = histogram[b, e]
            total += count
            earlier += count if b < cuda.blockIdx.x else np.int32(0)
        cuda.atomic.add(before, e, earlier)
        cuda.atomic.add(totals, e, total)


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
def make_tables(pieces: int, source: str, dtype: str | None = None) -> Callable[..., Any]:
    """kernel(logits, over_all, capacity, stretch, counter, histogram, experts, share, slots, sources, offsets, dropped, x, rows)[B, threads,
    stream, 4 * k * stretch] for 32 * pieces experts at most.

    source: "logits" [1, T, E], "parts" [P, T, E or more], or "given": experts [T, k] exist, and logits, over_all and share are not looked at
    dtype: of the rows that x [T, D] is dispatched to (layout.py), D a multiple of 8; None: there are none, and x, rows are not looked at
    stretch: tokens of a block. counter: groups.grid_sync's. histogram: int32 [B, 32 * pieces], scratch. slots: int32 [T * k]"""
    num_slots, num_starts, num_held = 32 * pieces, 32 * pieces + 1, SEGMENT // 32
    given, has_rows = source == "given", dtype is not None
    choose, find_starts = make_choose(pieces, source == "parts"), make_find_starts(pieces)
    ask, put = make_segment_copy(dtype or "fp32")

    @early()
    @cuda.jit(launch_bounds=(32 * warps_of(pieces), 1))
    def tables(
        logits, over_all, capacity, stretch, counter, histogram, experts, share, slots, sources, offsets, dropped, x, rows
    ):  # fmt: skip
        counts = cuda.shared.array(num_slots, types.int32)
        before = cuda.shared.array(num_slots, types.int32)
        totals = cuda.shared.array(num_slots, types.int32)
        starts = cuda.shared.array(num_starts, types.int32)
        places = cuda.shared.array(0, types.int32)
        thread, threads, block = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockIdx.x
        num_tokens, top_k = experts.shape
        num_experts = offsets.shape[0] - 1
        first = block * stretch
        tokens_here = max(0, min(stretch, num_tokens - first))
        count = tokens_here * top_k
        ptx.take_turn()
        for e in range(thread, num_slots, threads):
            counts[e] = before[e] = totals[e] = 0
        if given:
            for i in range(thread, count, threads):
                t = first + i // top_k
                expert = experts[t, i % top_k]
                places[i] = expert if 0 <= expert and expert < num_experts else NOBODY
        else:
            for t in range(first + warp_index(), min(first + stretch, num_tokens), num_warps()):
                choose(logits, t, num_experts, over_all, experts, share, places, (t - first) * top_k)
        cuda.syncthreads()
        if warp_index() == 0:
            rank_pairs(places, count, counts)
        cuda.syncthreads()
        if has_rows:  # a warp's first segment is on its way while blocks wait for each other; warp 0's would hold up its release
            held = cuda.local.array(num_held, types.float32)
            num_segments = (x.shape[1] + SEGMENT - 1) // SEGMENT
            work = warp_index()
            if 0 < work and work < tokens_here * num_segments:
                ask(held, x, first + work // num_segments, work % num_segments)
        if cuda.gridDim.x > 1:
            for e in range(thread, num_slots, threads):
                histogram[block, e] = counts[e]
            groups.grid_sync(counter)
            sum_histogram(histogram, num_slots, before, totals)
        else:
            for e in range(thread, num_slots, threads):
                totals[e] = counts[e]
        cuda.syncthreads()
        if warp_index() == 0:
            find_starts(totals, capacity, starts, dropped)
        cuda.syncthreads()
        for i in range(thread, count, threads):
            place, slot = places[i], NOBODY
            if place >= 0:
                expert = place % RANK
                within = before[expert] + place // RANK
                if within < capacity:
                    slot = starts[expert] + within
                    sources[slot] = first * top_k + i
            slots[first * top_k + i] = slot
            places[i] = slot
        kept = starts[num_slots]
        for i in range(kept + block * threads + thread, num_tokens * top_k, cuda.gridDim.x * threads):
            sources[i] = NOBODY
        if block == 0:
            for e in range(thread, num_experts + 1, threads):
                offsets[e] = starts[e]
        if has_rows:
            if work == 0 and work < tokens_here * num_segments:
                ask(held, x, first, 0)
            cuda.syncthreads()
            while work < tokens_here * num_segments:
                put(held, rows, places, work // num_segments * top_k, top_k, work % num_segments)
                work += num_warps()
                if work < tokens_here * num_segments:
                    ask(held, x, first + work // num_segments, work % num_segments)

    return tables


def warps_of(pieces: int) -> int:
    """Warps of a block at most: a lane that holds many logits needs the registers of two."""
    return 16 if pieces < 16 else 8


def pieces_of(num_experts: int) -> int:
    """The least power of two that 32 lanes can hold the experts with."""
    return 1 << max(0, (num_experts - 1) // 32).bit_length()


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    integers = (types.int32, types.int64, I32_1D, I32_2D, I32_2D)
    tables = (F32_3D, types.boolean, *integers, F32_2D, I32_1D, I32_1D, I32_1D, I32_1D, F32_2D)
    for pieces in (1, 2, 4, 8, 16):
        yield f"tables_{32 * pieces}", make_tables(pieces, "logits"), (*tables, F32_2D)
        yield f"tables_{32 * pieces}_fp16", make_tables(pieces, "parts", "fp16"), (*tables, array_type("fp16", 2))
    for pieces in (1, 16):
        yield f"tables_{32 * pieces}_given", make_tables(pieces, "given"), (*tables, F32_2D)
    for dtype in ("fp32", "bf16"):
        yield f"tables_128_{dtype}", make_tables(4, "parts", dtype), (*tables, array_type(dtype, 2))
