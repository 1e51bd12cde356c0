"""Rung 8, and the production kernel of up to 16 tokens: y[t, n] = sum_k x[t, k] * w[n, k] on the tensor cores.

x [T, K], w [N, K] in global memory; a normalised x in shared memory. Reads N*K weights once, past L1, and x once for each
block (16 * TILES * GROUPS rows of w), from L2: bound by the weights' bytes. An mma does 16 rows * 16 k * 8 tokens in one
instruction, so at T = 1 it idles for 7/8, and still issues fewer instructions than 16-byte loads and FMAs do.

    mma m16n8k16    A = w (16 rows), B = x (8 tokens, COLUMNS of them), C in registers
    warp            (group, split): TILES m16 tiles of w; of their K every SPLITS-th piece of 64 numbers
    lane (g, t)     of rows g and g + 8: the 16 bytes that start at k = 8 t, then those at 8 t + 32 (int8: 16 t, 16 numbers)

A and B may number K as they like, if they agree: a lane's 16 bytes are used as they come, words 2i and 2i + 1 as the two
halves of mma i, and x is read at the same k. Nothing is shuffled, no `ldmatrix`, no staging of w in shared memory.
int8 becomes pairs of fp16 in registers (ptx.s8x4_to_f16x4, 5 instructions for 4 weights); its scale is applied to the sum.

The SPLITS partial sums meet in shared memory after one barrier and are added there by all threads of the group.
K must be a multiple of 16 bytes; beyond the row's end nothing is read, by a predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.cuda_api import cuda, early
from l1_kernels.sbi_gemm.job import CARRIED, PER_LOAD, Job, make_fetch_ahead, make_row_of, make_write, signature
from l1_kernels.sbi_gemm.prologue import HELD_PIECES, make_ask, make_norm, make_norm_held
from l1_kernels.sbi_gemm.wide import example_jobs, expert_jobs
from l1_kernels.sbi_gemm.words import ZERO_WORDS, make_load_x_pairs

ZERO, ONE = np.float32(0), np.float32(1)
PIECE = 64  # numbers of K that a warp takes at a time
lane_index, warp_index = groups.lane, groups.warp


@dataclass(frozen=True, slots=True)
class Tensor:
    """tiles (of 16 rows, a warp), splits, groups, unroll: as in Wide; columns: tokens / 8, 1 or 2;
    blocks: on one multiprocessor, over which the tiles are dealt (0: a block a tile)."""

    tiles: int = 1
    splits: int = 8
    groups: int = 1
    unroll: int = 2
    columns: int = 1
    blocks: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.splits * self.groups

    @property
    def tile(self) -> int:
        """Rows of w in a block's tile."""
        return 16 * self.tiles * self.groups

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor that registers must leave room for: 16 warps of 128 registers a lane, or 12 of 168 where
        the next tile's words, or 16 tokens' x, are held as well."""
        warps = 12 if self.blocks or self.columns * self.tiles * self.unroll > 2 else 16
        return max(1, warps * 32 // self.threads)

    def shared_bytes(self, job: Job, num_tokens: int, size: int) -> int:
        """Dynamic shared memory: the normalised x."""
        return 4 * pitch_of(size) * num_tokens if job.norm else 0

    @property
    def sums_bytes(self) -> int:
        """Static shared memory, of which a block has 48 KiB: the partial sums."""
        return 4 * 32 * 4 * self.tiles * self.columns * self.splits * self.groups


def pitch_of(size: int) -> int:
    """Words from one token's row of pairs to the next in shared memory: 64 bytes beyond a multiple of 128, so that the
    eight lanes that read at the same time (two tokens, 64 bytes each) meet 32 different banks."""
    return (size + 63) // 64 * 32 + 16


@cache
def make_load_shared_pairs() -> Callable[..., Any]:
    @cuda.jit(device=True, forceinline=True)
    def load_shared_pairs(shared, index, inside):
        return ptx.load16_shared(shared, index) if inside else ZERO_WORDS

    return load_shared_pairs


@cache
def make_tensor(job: Job, plan: Tensor, single: bool = False, pieces: int = 0) -> Callable[..., Any]:
    """kernel(*signature(job))[blocks, plan.threads, stream, plan.shared_bytes(...)] for fp16, bf16 and int8 weights.
    single: one token, whose norm the whole block makes; pieces: as in make_wide, for a single token.
    """
    tiles, splits, num_groups, unroll, columns, tile_rows = plan.tiles, plan.splits, plan.groups, plan.unroll, plan.columns, plan.tile
    int8 = job.dtype == "int8"
    per = PER_LOAD[job.dtype]
    loads = PIECE // (4 * per)  # of a row in a piece: two of 16 bits, one of int8
    x_loads = 2  # lane (g, t)'s numbers of x in a piece: 8 each, `x_hop` apart, from x_per * t on
    x_hop, x_per = (8, 16) if int8 else (32, 8)
    hop = PIECE * splits
    step = hop * unroll
    held = unroll * tiles * 2 * loads * 4
    holds_x = job.carried and job.norm is None
    held_x_size = unroll * columns * x_loads * 4 if holds_x else 1
    num_starts = tiles * 2
    num_sums = tiles * columns * 4
    pairs_per_split = (tiles * columns * 2 + splits - 1) // splits  # pairs of sums that a thread ends
    parts_size = num_sums * 32 * splits * num_groups
    is_pair, is_inner, has_norm = job.pair == "rows", job.pair == "inner", job.norm is not None
    by_pair, by_rows, is_active = job.experts == "pairs", job.experts in ("rows", "active"), job.experts == "active"
    gathers, settled, matrices = job.gathers, job.settled, 2 if job.gated else 1
    segments = 2 if is_inner else 1
    dealt = plan.blocks > 0  # otherwise a block has one tile, and nothing of a next one takes up registers
    mma = ptx.mma_bf16 if CARRIED[job.dtype] == "bf16" else ptx.mma_f16
    load_x, load_shared = make_load_x_pairs(CARRIED[job.dtype], job.carried), make_load_shared_pairs()
    norm = make_norm(job.norm or "rmsnorm", CARRIED[job.dtype], single)
    holds_norm, norm_size = job.norm is not None and pieces > 0, max(1, pieces) * 24
    ask, ask_x = make_ask(pieces, plan.threads)
    norm_held = make_norm_held(job.norm or "rmsnorm", CARRIED[job.dtype], pieces, plan.threads)
    fetch_ahead = make_fetch_ahead(job.dtype)
    row_of, row_of_first = make_row_of(job.gated, 16), make_row_of(job.gated and not is_pair, 16)
    end_first, end_second = make_end(job, False), make_end(job, True)
    gated_first, gated_second = job.gated and not is_pair, job.gated

    @cuda.jit(device=True, forceinline=True)
    def find_rows(starts, first_slot, second, above, num_rows, size, first_k):
        """Where this lane (g, t)'s first 16 bytes lie of rows g and g + 8 of each tile, of a matrix with `above` rows above it. A row past
        the last one is the last, read again and not written."""
        lane = lane_index()
        for i in range(tiles * 2):
            slot = first_slot + i * 8 + (lane >> 2)
            row = row_of(slot, num_rows) if second else row_of_first(slot, num_rows)
            starts[i] = np.int64(above + min(row, num_rows - 1)) * size + first_k + (lane & 3) * per

    @cuda.jit(device=True, forceinline=True)
    def find_x(x_starts, first_token, num_tokens, size, first_k, routes, share):
        """The same of x, whose rows are tokens."""
        lane = lane_index()
        for c in range(columns):
            token = np.int64(first_token + min(c * 8 + (lane >> 2), num_tokens - 1))
            if gathers:
                token = np.int64(routes[2 * cuda.gridDim.y + 1 + token]) // share
            x_starts[c] = token * size + first_k + (lane & 3) * x_per

    @cuda.jit(device=True, forceinline=True)
    def advance(starts, x_starts):
        for i in range(tiles * 2):
            starts[i] += step
        for c in range(columns):
            x_starts[c] += step

    @cuda.jit(device=True, forceinline=True)
    def fetch(words, w, starts, k, size, u, checked):
        """Asks for piece u of the warp's rows; `checked`: where it lies inside."""
        left = size - (lane_index() & 3) * per
        for i in range(tiles * 2):
            for j in range(loads):
                further = u * hop + j * 4 * per
                if checked:
                    v = ptx.load16_stream_if(w, starts[i] + further, k + further < left)
                else:
                    v = ptx.load16_stream(w, starts[i] + further)
                at = ((u * tiles * 2 + i) * loads + j) * 4
                words[at], words[at + 1], words[at + 2], words[at + 3] = v[0], v[1], v[2], v[3]

    @cuda.jit(device=True, forceinline=True)
    def fetch_x(held_x, x, x_starts, k, size, u, checked):
        """Asks for the 16-bit x that piece u meets, with it: it would cost a wait of its own after it."""
        if holds_x:
            left = size - (lane_index() & 3) * x_per
            for c in range(columns):
                for j in range(x_loads):
                    further = u * hop + j * x_hop
                    v = load_x(x, x_starts[c] + further, not checked or k + further < left)
                    at = ((u * columns + c) * x_loads + j) * 4
                    held_x[at], held_x[at + 1], held_x[at + 2], held_x[at + 3] = v[0], v[1], v[2], v[3]

    @cuda.jit(device=True, forceinline=True)
    def ask_step(words, held_x, w, x, starts, x_starts, first_k, size):
        """Asks for the first pieces of rows that were just found."""
        for u in range(unroll):
            fetch(words, w, starts, first_k, size, u, True)
            fetch_x(held_x, x, x_starts, first_k, size, u, True)
        advance(starts, x_starts)

    @cuda.jit(device=True, forceinline=True)
    def product(words, i, b0, b1, sums, at):
        """One mma: words i.. of row g and of row g + 8 against four words of x."""
        c = (sums[at], sums[at + 1], sums[at + 2], sums[at + 3])
        if int8:
            a0, a2 = ptx.s8x4_to_f16x4(words[i])
            a1, a3 = ptx.s8x4_to_f16x4(words[i + 4])
        else:
            a0, a1, a2, a3 = words[i], words[i + 4 * loads], words[i + 1], words[i + 4 * loads + 1]
        c = mma((a0, a1, a2, a3), (b0, b1), c)
        sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = c[0], c[1], c[2], c[3]

    @cuda.jit(device=True, forceinline=True)
    def multiply(words, held_x, x, first_token, num_tokens, shared, pitch, k, size, u, sums, checked):
        """Piece u, which has come, with its part of x."""
        lane = lane_index()
        for c in range(columns):
            token = first_token + min(c * 8 + (lane >> 2), num_tokens - 1)
            for j in range(x_loads):
                k_x = k + u * hop + j * x_hop + (lane & 3) * x_per
                inside = not checked or k_x < size
                if has_norm:
                    b = load_shared(shared, token * pitch + (k_x >> 1), inside)
                elif holds_x:
                    at = ((u * columns + c) * x_loads + j) * 4
                    b = (held_x[at], held_x[at + 1], held_x[at + 2], held_x[at + 3])
                else:
                    b = load_x(x, np.int64(token) * size + k_x, inside)
                for m in range(tiles):
                    here = (m * columns + c) * 4
                    first = (u * tiles + m) * 2 * loads * 4 + (2 if int8 else 4) * j
                    product(words, first, b[0], b[1], sums, here)
                    product(words, first + (1 if int8 else 2), b[2], b[3], sums, here)

    @cuda.jit(device=True, forceinline=True)
    def rescale(sums, scale, scale_b, first_slot, num_rows):
        """The first product's sums in units of the second one's scale, which `end` applies."""
        for m in range(tiles):
            row = min(first_slot + m * 16 + (lane_index() >> 2), num_rows - 1)
            row8 = min(row + 8, num_rows - 1)
            low, high = scale[row] / scale_b[row], scale[row8] / scale_b[row8]
            for c in range(columns):
                at = (m * columns + c) * 4
                sums[at] *= low
                sums[at + 1] *= low
                sums[at + 2] *= high
                sums[at + 3] *= high

    @early()
    @cuda.jit(launch_bounds=(plan.threads, plan.resident))
    def tensor(
        x, xb, gain, shift, has_shift, gain_b, shift_b, has_shift_b, eps, eps_b, w, scale, bias, has_bias, y,
        wb, scale_b, bias_b, has_bias_b, yb, blocks_a, ahead, ahead_width, routes, share,
    ):  # fmt: skip
        parts = cuda.shared.array(parts_size, types.float32)
        shared = cuda.shared.array(0, types.uint32)
        starts = cuda.local.array(num_starts, types.int64)
        x_starts = cuda.local.array(columns, types.int64)
        words = cuda.local.array(held, types.uint32)
        held_x = cuda.local.array(held_x_size, types.uint32)
        sums = cuda.local.array(num_sums, types.float32)
        lane, warp = lane_index(), warp_index()
        group = warp // splits
        split = warp - group * splits
        first_k = split * PIECE
        second = False
        block, stride = cuda.blockIdx.x, cuda.gridDim.x
        if is_pair:
            second = block >= blocks_a
            if second:
                block -= blocks_a
                stride -= blocks_a
                w, scale, bias, has_bias = wb, scale_b, bias_b, has_bias_b
                gain, shift, has_shift, eps = gain_b, shift_b, has_shift_b, eps_b
            else:
                stride = blocks_a
        num_rows, size = w.shape
        above = np.int64(0)  # rows of w above this block's matrix
        first_token, num_tokens, written = np.int64(0), np.int64(x.shape[0]), np.int64(0)  # this block's rows of x; the first of y
        if by_pair or by_rows:
            num_rows = y.shape[1] * matrices
            if not settled:
                ptx.take_turn()
            if by_pair:
                written = np.int64(cuda.blockIdx.y)
                first_token, num_tokens = written // share, np.int64(1)
                above = np.int64(routes[written]) * num_rows
            else:
                expert, row = np.int64(cuda.blockIdx.y), np.int64(cuda.blockIdx.y)
                if is_active:
                    expert = np.int64(routes[row])
                    row += cuda.gridDim.y
                first_token = np.int64(routes[row])
                num_tokens = np.int64(routes[row + 1]) - first_token if expert >= 0 else np.int64(0)
                written = first_token
                above = expert * num_rows
        num_slots = num_rows
        if gated_first or (gated_second and second):
            num_slots = ((num_rows >> 1) + 7) // 8 * 16
        num_tiles = (num_slots + tile_rows - 1) // tile_rows
        if num_tokens == 0:
            block = num_tiles
        here = min(num_tokens, np.int64(8 * columns))  # tokens at a time: all, unless an expert has more
        if block < num_tiles:
            find_rows(starts, block * tile_rows + group * 16 * tiles, second, above, num_rows, size, first_k)
            for u in range(unroll):
                fetch(words, w, starts, first_k, size, u, True)
        if holds_norm:
            held_norm = cuda.local.array(norm_size, types.float32)
            ask(held_norm, size, gain, shift, has_shift)
        if settled or not (by_pair or by_rows):
            ptx.take_turn()
        if holds_norm:
            ask_x(held_norm, x, 0)
        if block < num_tiles:
            find_x(x_starts, first_token, here, size, first_k, routes, share)
            for u in range(unroll):
                fetch_x(held_x, x, x_starts, first_k, size, u, True)
            advance(starts, x_starts)
        pitch = ((size + 63) >> 6) * 32 + 16
        if holds_norm:
            norm_held(held_norm, size, eps, shared, 0)
        elif has_norm:
            norm(x, gain, shift, has_shift, eps, shared, pitch)
        tile = block
        while tile < num_tiles:
            first_slot = tile * tile_rows + group * 16 * tiles
            for i in range(num_sums):
                sums[i] = ZERO
            for segment in range(segments):
                w_now, x_now = w, x
                if is_inner and segment == 1:
                    if int8:
                        rescale(sums, scale, scale_b, first_slot, num_rows)
                    w_now, x_now = wb, xb
                    size = wb.shape[1]
                done = np.int64(0)  # of the row; the same in all lanes, as the branches are
                while done + 2 * step <= size:
                    k = first_k + done
                    for u in range(unroll):  # the place that is free now takes its next piece at once
                        multiply(words, held_x, x_now, first_token, here, shared, pitch, k, size, u, sums, False)
                        fetch(words, w_now, starts, k + step, size, u, False)
                        fetch_x(held_x, x_now, x_starts, k + step, size, u, False)
                    advance(starts, x_starts)
                    done += step
                while done < size:
                    k = first_k + done
                    more = done + step < size
                    for u in range(unroll):
                        multiply(words, held_x, x_now, first_token, here, shared, pitch, k, size, u, sums, True)
                        if more:
                            fetch(words, w_now, starts, k + step, size, u, True)
                            fetch_x(held_x, x_now, x_starts, k + step, size, u, True)
                        elif is_inner and segment == 0:  # the second matrix's first
                            if u == 0:
                                find_rows(starts, first_slot, second, above, num_rows, wb.shape[1], first_k)
                                find_x(x_starts, first_token, here, wb.shape[1], first_k, routes, share)
                            fetch(words, wb, starts, first_k, wb.shape[1], u, True)
                            fetch_x(held_x, xb, x_starts, first_k, wb.shape[1], u, True)
                    advance(starts, x_starts)
                    done += step
            if is_inner:
                size = w.shape[1]
            if by_rows and num_tokens > here:  # the same rows of w again, for the expert's next tokens
                find_rows(starts, first_slot, second, above, num_rows, size, first_k)
                find_x(x_starts, first_token + here, min(num_tokens - here, here), size, first_k, routes, share)
                ask_step(words, held_x, w, x, starts, x_starts, first_k, size)
            elif dealt and tile + stride < num_tiles:
                find_rows(starts, first_slot + stride * tile_rows, second, above, num_rows, size, first_k)
                find_x(x_starts, first_token, here, size, first_k, routes, share)
                ask_step(words, held_x, w, x, starts, x_starts, first_k, size)
            else:
                fetch_ahead(ahead, ahead_width)

            base = (group * splits + split) * num_sums * 32 + lane
            for i in range(num_sums):
                parts[base + i * 32] = sums[i]
            cuda.syncthreads()
            for i in range(pairs_per_split):
                item = i * splits + split  # (tile, column, token of two): the sums of row g and of row g + 8
                if item < tiles * columns * 2:
                    m, rest = item // (2 * columns), item % (2 * columns)
                    at = group * splits * num_sums * 32 + ((m * columns + (rest >> 1)) * 4 + (rest & 1)) * 32 + lane
                    low, high = ZERO, ZERO
                    for s in range(splits):
                        low += parts[at + s * num_sums * 32]
                        high += parts[at + s * num_sums * 32 + 64]
                    t = (rest >> 1) * 8 + (lane & 3) * 2 + (rest & 1)
                    slot = first_slot + m * 16 + (lane >> 2)
                    if t < here:
                        if is_pair and second:
                            end_second(yb, t, slot, low, high, above, num_rows, scale, bias, has_bias, bias, False)
                        elif is_inner:
                            end_first(y, t, slot, low, high, above, num_rows, scale_b, bias, has_bias, bias_b, has_bias_b)
                        else:
                            end_first(y, written + t, slot, low, high, above, num_rows, scale, bias, has_bias, bias, False)
            if by_rows and num_tokens > here:
                num_tokens -= here
                first_token += here
                written += here
                here = min(num_tokens, here)
            elif not dealt:
                break
            else:
                tile += stride
            cuda.syncthreads()

    return tensor


@cache
def make_end(job: Job, second: bool) -> Callable[..., Any]:
    """end(y, t, slot, low, high, ...): scale, biases and `write` for the sums of the rows of slots `slot` and `slot + 8`."""
    int8 = job.dtype == "int8"
    gated = job.gated and (second or job.pair != "rows")
    write = make_write(job, second)

    @cuda.jit(device=True, forceinline=True)
    def finished(total, n, scale, bias, has_bias, bias_b, has_bias_b):
        if int8:
            total *= scale[n]
        if has_bias:
            total += bias[n]
        if has_bias_b:
            total += bias_b[n]
        return total

    @cuda.jit(device=True, forceinline=True)
    def end(y, t, slot, low, high, above, num_rows, scale, bias, has_bias, bias_b, has_bias_b):
        if gated:
            width = num_rows >> 1
            f = ((slot >> 4) << 3) + (slot & 7)
            if f < width:
                gate = finished(low, above + f, scale, bias, has_bias, bias_b, has_bias_b)
                write(y, t, f, gate, finished(high, above + width + f, scale, bias, has_bias, bias_b, has_bias_b))
        else:
            if slot < num_rows:
                write(y, t, slot, finished(low, above + slot, scale, bias, has_bias, bias_b, has_bias_b), ZERO)
            if slot + 8 < num_rows:
                write(y, t, slot + 8, finished(high, above + slot + 8, scale, bias, has_bias, bias_b, has_bias_b), ZERO)

    return end


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for name, job in example_jobs(("fp16", "bf16", "int8")):
        yield f"tensor_{name}", make_tensor(job, Tensor()), signature(job)
        if job.norm and job.dtype != "bf16":
            for pieces in (0, HELD_PIECES):
                yield f"tensor_{name}_single_{pieces}", make_tensor(job, Tensor(), True, pieces), signature(job)
    for name, job in expert_jobs(("fp16", "bf16", "int8"), ("pairs", "rows", "active")):
        yield f"tensor_{name}", make_tensor(job, Tensor(columns=1 if job.experts == "pairs" else 2)), signature(job)
    job = Job("fp16", norm="layernorm")
    yield "tensor_fp16_2_tiles", make_tensor(job, Tensor(tiles=2, splits=4, groups=2, columns=2)), signature(job)
