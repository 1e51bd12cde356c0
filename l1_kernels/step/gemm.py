"""GeMMs of the step kernel: weights through a ring in shared memory, 8 rows at a time, on tensor cores.

    ring    `stages` of 8 rows * (64 * warps) numbers, one after the other in the order in which they will be used
    feeder  a warp that waits until a stage is free, and asks for the next 8 rows' piece of it, 512 bytes an instruction;
            it is not told of barriers, so it runs as far ahead as the ring is long, 190 KB a block or 25 MB on an H200, but
            with FLYING_BYTES under way at a time: with all of the ring x took 3 us to come from L2 (README.md)
    workers `warps` warps: of a stage each takes 64 numbers of the 8 rows

    mma m16n8k16    A = x (16 tokens, those beyond the eighth only where COLUMNS = 2), B = w (8 rows), sums in registers
    lane (g, t)     of row g the 16 bytes at k = 8 t and at 8 t + 32 (int8: 16 bytes at 16 t), and of token g the same k

A and B may number K as they like, if they agree (sbi_gemm/tensor.py does the same, with w as A). When a tile of 8 rows is
done the workers' sums meet in shared memory; a crew of a few warps adds them up, applies scale, bias, activation and residual,
while the others go on with the next tile, which is another crew's. int8 weights become pairs of fp16 in registers, exactly.

Order of work: for each source of x, for each segment of its K that x has room for, for each tile of this block, for each
stage. With more than one segment a tile's sums wait in `kept`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import feed_ptx, groups, ptx
from l1_kernels.activation.gpu import FUNCTIONS
from l1_kernels.cuda_api import cuda
from l1_kernels.sbi_gemm.job import CARRIED
from l1_kernels.sbi_gemm.words import ZERO_WORDS, ZEROS4
from l1_kernels.step.activations import PADDED, QUARTERS, make_load_x, make_norm
from l1_kernels.step.program import (
    ACTIVATE,
    ADD,
    BIAS,
    CARRY,
    FIRST,
    FLAGS,
    GATED,
    GEMM,
    GROUP,
    KIND,
    NORM,
    ROWS,
    SCALE,
    SOURCE,
    TILE,
    TILES,
    WIDTH,
    K,
    W,
    Y,
)  # fmt: skip
from l1_kernels.step.together import make_together

ZERO, ONE = np.float32(0), np.float32(1)
MAX_STAGES = 32
EMPTY = 8 * MAX_STAGES  # bytes from a stage's mbarrier "full" to its "empty"
MAX_KEPT = 8  # tiles of a block in an operation of several segments
ALL = 0xFFFFFFFF  # lanes
FLYING_BYTES = 48 * 1024  # of a block's weights under way: by Little's law memory is busy with less; what more costs other loads is a guess, see README.md
PIECE = 64  # numbers that a warp takes of a stage
lane_index, warp_index = groups.lane, groups.warp


def itemsize_of(dtype: str) -> int:
    return 1 if dtype == "int8" else 2


def row_bytes(dtype: str, warps: int) -> int:
    """From row to row of a stage: 64 bytes beyond a multiple of 128, against bank conflicts."""
    return (PIECE * warps * itemsize_of(dtype) + 127) // 128 * 128 + 64


def stage_bytes(dtype: str, warps: int) -> int:
    return TILE * row_bytes(dtype, warps)


@cuda.jit(device=True, forceinline=True)
def first_item(first):
    """The block's first item of an operation whose item 0 is block `first`'s."""
    item = np.int32(cuda.blockIdx.x - np.int32(first))
    return np.int32(item + cuda.gridDim.x) if item < 0 else item


@cuda.jit(device=True, forceinline=True)
def row_of(slot, num_rows, gated):
    """Which row of weights a slot of the tiles is: gated, a gate row and its up row side by side."""
    row = np.int32((slot >> 1) + (slot & 1) * (num_rows >> 1)) if gated else np.int32(slot)
    return np.int32(min(row, num_rows - 1))


@cuda.jit(device=True, forceinline=True)
def await_barrier(barrier, parity):
    while feed_ptx.barrier_passed(barrier, parity) == 0:
        pass


@cache
def make_feed(dtype: str, warps: int) -> Callable[..., Any]:
    """feed(program, base, ring, x_numbers, stages): all the weights of the program that this block will use.
    base: the shared address of the mbarriers, ring: of the first stage."""
    itemsize, pitch, stage_size, width = itemsize_of(dtype), row_bytes(dtype, warps), stage_bytes(dtype, warps), PIECE * warps
    copies = (width * itemsize + 511) // 512  # of 16 bytes a lane, for a row
    flying = max(1, FLYING_BYTES // stage_size) - 1  # stages under way besides the one that is asked for

    @cuda.jit(device=True)
    def feed(program, base, ring, x_numbers, stages):
        lane = np.int32(lane_index())
        slot, parity = np.int32(0), np.int32(1)
        addresses = cuda.local.array(TILE, types.int64)
        num_ops = program.shape[0]
        column = min(lane, WIDTH - 1)
        ahead = program[0, column]  # the next operation's row, a lane a column: asked for an operation early
        for op in range(num_ops):
            word = ahead
            if op + 1 < num_ops:
                ahead = program[op + 1, column]
            if cuda.shfl_sync(ALL, word, KIND) == GEMM:
                rows_a, rows_b = np.int32(cuda.shfl_sync(ALL, word, ROWS)), np.int32(cuda.shfl_sync(ALL, word, ROWS + GROUP))
                gated_a, gated_b = cuda.shfl_sync(ALL, word, FLAGS) & GATED, cuda.shfl_sync(ALL, word, FLAGS + GROUP) & GATED
                tiles_a = np.int32(cuda.shfl_sync(ALL, word, TILES))
                tiles = np.int32(tiles_a + cuda.shfl_sync(ALL, word, TILES + GROUP))
                weights_b = cuda.shfl_sync(ALL, word, W + SOURCE)
                first = first_item(cuda.shfl_sync(ALL, word, FIRST))
                for source in range(2):
                    size, weights = np.int32(cuda.shfl_sync(ALL, word, K + source * SOURCE)), cuda.shfl_sync(ALL, word, W + source * SOURCE)
                    if source == 1 and rows_b > 0:
                        size = np.int32(0)  # a second group of rows, on the same x
                    begin = np.int32(0)
                    while begin < size:
                        end = np.int32(min(size, begin + x_numbers))
                        tile = first
                        while tile < tiles:
                            for r in range(TILE):
                                if tile < tiles_a:
                                    row = row_of(np.int32(tile * TILE + r), rows_a, gated_a)
                                    addresses[r] = weights + np.int64(row) * size * itemsize + lane * 16
                                else:
                                    row = row_of(np.int32((tile - tiles_a) * TILE + r), rows_b, gated_b)
                                    addresses[r] = weights_b + np.int64(row) * size * itemsize + lane * 16
                            k = begin
                            while k < end:
                                num_bytes = np.int32(min(end - k, width) * itemsize - lane * 16)
                                full = np.int32(base + slot * 8)
                                await_barrier(np.uint32(full + EMPTY), np.uint32(parity))
                                ptx.wait_async(flying)
                                to, at = np.int32(ring + slot * stage_size + lane * 16), np.int64(k) * itemsize
                                for r in range(TILE):
                                    for j in range(copies):
                                        if j * 512 < num_bytes:
                                            feed_ptx.copy16(np.uint32(to + r * pitch + j * 512), addresses[r] + at + j * 512)
                                feed_ptx.barrier_arrive_copied(np.uint32(full))
                                ptx.commit_async()
                                slot = np.int32(slot + 1)
                                if slot == stages:
                                    slot, parity = np.int32(0), np.int32(1 - parity)
                                k = np.int32(k + width)
                            tile = np.int32(tile + cuda.gridDim.x)
                        begin = end

    return feed


@cache
def make_gemm(dtype: str, norm_kind: str, activation: str | None, columns: int, warps: int) -> Callable[..., Any]:
    """gemm(desc, row, waits, num_tokens, base, x_first, ring, x_numbers, stages, counter, seen, slot, parity, half) ->
    (seen, slot, parity, half): where the barrier, the ring and the halves of `parts` stand afterwards. desc[row:] is the
    operation; `waits`: for the one before; base, x_first, ring: shared addresses of mbarriers, x, stages."""
    int8 = dtype == "int8"
    carried = CARRIED[dtype]
    itemsize, pitch, stage_size, width = itemsize_of(dtype), row_bytes(dtype, warps), stage_bytes(dtype, warps), PIECE * warps
    mma = ptx.mma_bf16 if carried == "bf16" else ptx.mma_f16
    narrow = ptx.f32_to_bf16 if carried == "bf16" else ptx.f32_to_f16
    function = FUNCTIONS[activation] if activation is not None else None
    load_x = make_load_x(carried, warps)
    ask_norm, norm_one, norm_many = make_norm(norm_kind, carried, warps)
    norm_size = QUARTERS * 4
    meet, wait = make_together(warps)
    sums_size = 64 * columns  # of a warp: 8 rows, 8 or 16 tokens
    parts_size = 2 * warps * sums_size
    kept_size = MAX_KEPT * sums_size
    x_bytes, x_hop = (32, 16) if int8 else (16, 64)  # of x: from lane t to t + 1, and to the lane's second 16 bytes
    two = columns == 2

    @cuda.jit(device=True, forceinline=True)
    def fetch(address, inside):
        return feed_ptx.load16_shared_at(np.uint32(address)) if inside else ZERO_WORDS

    @cuda.jit(device=True, forceinline=True)
    def multiply(c, x, y, i, b0, b1):
        """x, y: the words of tokens g and g + 8; i: the first of the pair that meets b."""
        if two:
            return mma((x[i], y[i], x[i + 1], y[i + 1]), (b0, b1), c)
        return mma((x[i], np.uint32(0), x[i + 1], np.uint32(0)), (b0, b1), c)

    @cuda.jit(device=True, forceinline=True)
    def ask(desc, row, tile, tiles_a, tiles, source, last, thread, num_tokens):
        """What a tile's finishing threads add and multiply, asked for before its sums are made:
        (factor, added, before, whether this thread writes, where)."""
        factor, added, before, out = ONE, ZERO, ZERO, np.int32(0)
        second = tile >= tiles_a
        group = GROUP if second else 0
        num_rows, flags = np.int32(desc[row + ROWS + group]), np.int32(desc[row + FLAGS + group])
        token = np.int32(thread >> 3)
        slot = np.int32((tile - tiles_a if second else tile) * TILE + (thread & 7))
        written = tile < tiles and token < num_tokens and slot < num_rows
        if written:
            at = np.int64(row_of(slot, num_rows, flags & GATED)) * 4
            out = np.int32(token * (num_rows >> 1) + (slot >> 1)) if flags & GATED else np.int32(token * num_rows + slot)
            if int8:
                factor = feed_ptx.load_f32_at(desc[row + SCALE + (SOURCE if second or source == 1 else 0)] + at)
            if last:
                if desc[row + BIAS + group]:
                    added = feed_ptx.load_f32_at(desc[row + BIAS + group] + at)
                if flags & ADD:
                    before = feed_ptx.load_f32_at(desc[row + Y + group] + np.int64(out) * 4)
        return factor, added, before, written, out

    @cuda.jit(device=True)
    def gemm(desc, row, waits, num_tokens, base, x_first, ring, x_numbers, stages, counter, seen, slot, parity, half):
        parts = cuda.shared.array(parts_size, types.float32)
        kept = cuda.shared.array(kept_size, types.float32)
        gains = cuda.local.array(norm_size, types.float32)
        shifts = cuda.local.array(norm_size, types.float32)
        one_norm = desc[row + NORM] != 0 and num_tokens == 1
        if one_norm:
            ask_norm(desc, row, gains, shifts)
        if waits:
            seen = wait(counter, seen)
        lane, warp = np.int32(lane_index()), np.int32(warp_index())
        g, t4 = np.int32(lane >> 2), np.int32(lane & 3)
        x_pitch = np.int32(x_numbers * 2 + 64)
        tiles_a = np.int32(desc[row + TILES])
        tiles = np.int32(tiles_a + desc[row + TILES + GROUP])
        size0, size1 = np.int32(desc[row + K]), np.int32(desc[row + K + SOURCE])
        if desc[row + ROWS + GROUP] > 0:
            size1 = np.int32(0)
        padded0 = np.int32(np.int32(size0 + PADDED - 1) // PADDED * PADDED)
        both = size1 > 0 and padded0 + size1 <= x_numbers - PADDED
        several = size1 > 0 or size0 > x_numbers
        first = first_item(desc[row + FIRST])
        # Who finishes a tile: `crew` warps, enough for 8 rows of all tokens; the crews take turns, so that what each adds is
        # there long before it is needed.
        crew_size = np.int32(np.int32(num_tokens + 3) >> 2)
        crews = np.int32(warps // crew_size)
        crew = np.int32(warp // crew_size)
        thread = np.int32(cuda.threadIdx.x - crew * crew_size * 32)
        single = size1 == 0 and size0 <= x_numbers
        factor, added, before, written, out = ask(
            desc, row, np.int32(first + crew * cuda.gridDim.x) if crew < crews else tiles, tiles_a, tiles, 0, single, thread, num_tokens
        )
        # Where this lane's part of a stage begins, and of the x that meets it.
        w_lane = np.int32(g * pitch + warp * (PIECE * itemsize) + t4 * 16)
        x_lane = np.int32(x_first + warp * (PIECE * 2) + t4 * x_bytes)
        token = np.int32(min(g, num_tokens - 1) * x_pitch)
        token8 = np.int32(min(g + 8, num_tokens - 1) * x_pitch)

        if one_norm:
            norm_one(desc, row, gains, shifts, x_first)
        elif desc[row + NORM] != 0:
            norm_many(desc, row, num_tokens, x_first, x_pitch)
        else:
            load_x(desc, row, 0, np.int32(0), np.int32(min(size0, x_numbers)), num_tokens, x_first, x_pitch)
        if both:
            load_x(desc, row, 1, np.int32(0), size1, num_tokens, np.int32(x_first + padded0 * 2), x_pitch)
        meet()
        for source in range(2):
            size = size1 if source == 1 else size0
            x_source = np.int32(x_lane + padded0 * 2) if both and source == 1 else x_lane
            begin = np.int32(0)
            while begin < size:
                end = np.int32(min(size, begin + x_numbers))
                last = end == size and (source == 1 or size1 == 0)
                fresh = begin == 0 and source == 0
                if not fresh:
                    factor, added, before, written, out = ask(
                        desc, row, np.int32(first + crew * cuda.gridDim.x) if crew < crews else tiles, tiles_a, tiles, source, last, thread, num_tokens
                    )
                    if not both:
                        meet()  # all have read what was there
                        load_x(desc, row, source, begin, end, num_tokens, x_first, x_pitch)
                        meet()
                at_kept = thread
                turn = np.int32(0)
                tile = first
                while tile < tiles:
                    c, d = ZEROS4, ZEROS4
                    left = np.int32(end - begin - warp * PIECE)  # numbers of the segment from this warp's on
                    x_at = x_source
                    k = begin
                    while k < end:
                        full = np.int32(base + slot * 8)
                        await_barrier(np.uint32(full), np.uint32(parity))
                        if left > 0:
                            at = np.int32(ring + slot * stage_size + w_lane)
                            xa, xb = fetch(x_at + token, True), fetch(x_at + token + x_hop, True)
                            ya, yb = xa, xb
                            if two:
                                ya, yb = fetch(x_at + token8, True), fetch(x_at + token8 + x_hop, True)
                            if int8:
                                v = fetch(at, t4 * 16 < left)
                                b0, b1 = ptx.s8x4_to_f16x4(v[0])
                                c = multiply(c, xa, ya, 0, b0, b1)
                                b0, b1 = ptx.s8x4_to_f16x4(v[1])
                                d = multiply(d, xa, ya, 2, b0, b1)
                                b0, b1 = ptx.s8x4_to_f16x4(v[2])
                                c = multiply(c, xb, yb, 0, b0, b1)
                                b0, b1 = ptx.s8x4_to_f16x4(v[3])
                                d = multiply(d, xb, yb, 2, b0, b1)
                            else:
                                v, w = fetch(at, t4 * 8 < left), fetch(at + 64, t4 * 8 + 32 < left)
                                c = multiply(c, xa, ya, 0, v[0], v[1])
                                d = multiply(d, xa, ya, 2, v[2], v[3])
                                c = multiply(c, xb, yb, 0, w[0], w[1])
                                d = multiply(d, xb, yb, 2, w[2], w[3])
                        cuda.syncwarp()
                        if lane == 0:
                            feed_ptx.barrier_arrive(np.uint32(full + EMPTY))
                        slot = np.int32(slot + 1)
                        if slot == stages:
                            slot, parity = np.int32(0), np.int32(1 - parity)
                        k, left, x_at = np.int32(k + width), np.int32(left - width), np.int32(x_at + width * 2)
                    place = np.int32((half * warps + warp) * sums_size + g * 8 + t4 * 2)
                    if g < num_tokens:
                        parts[place], parts[place + 1] = c[0] + d[0], c[1] + d[1]
                    if two:
                        parts[place + 64], parts[place + 65] = c[2] + d[2], c[3] + d[3]
                    meet()
                    if turn == crew:
                        total = ZERO
                        place = np.int32(half * (warps * sums_size) + min(thread, num_tokens * 8 - 1))
                        for i in range(warps):
                            total += parts[place + i * sums_size]
                        total *= factor
                        if several:
                            if not fresh:
                                total += kept[at_kept]
                            if not last:
                                kept[at_kept] = total
                        if last:
                            group = GROUP if tile >= tiles_a else 0
                            flags = np.int32(desc[row + FLAGS + group])
                            total += added
                            up = groups.shfl_down(total, 1)
                            if flags & ACTIVATE:
                                if function is not None:
                                    total = function(total)
                            if flags & GATED:
                                total *= up
                                written = written and (thread & 1) == 0
                            if written:
                                if flags & CARRY:
                                    feed_ptx.store_u16_at(desc[row + Y + group] + np.int64(out) * 2, narrow(total))
                                else:
                                    feed_ptx.store_f32_at(desc[row + Y + group] + np.int64(out) * 4, before + total)
                        factor, added, before, written, out = ask(
                            desc, row, np.int32(tile + crews * cuda.gridDim.x), tiles_a, tiles, source, last, thread, num_tokens
                        )
                    turn = np.int32(turn + 1)
                    if turn == crews:
                        turn = np.int32(0)
                    half = np.int32(1 - half)
                    at_kept = np.int32(at_kept + sums_size)
                    tile = np.int32(tile + cuda.gridDim.x)
                begin = end
        return seen, slot, parity, half

    return gemm
