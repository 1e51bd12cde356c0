"""Rung 7, and the production kernel of one token: y[n] = sum_k x[k] * w[n, k], every load 16 bytes, several in flight.

x [1, K], w [N, K] in global memory; a normalised x in shared memory. Reads N*K weights once, past L1; bound by their bytes.

    tile    ROWS * GROUPS rows of w to a block, then the block's next tile, `gridDim.x` further on
    warp    (group, split): ROWS rows, and of each every SPLITS-th piece of 32 lanes * 16 bytes (512 bytes, 4 cache lines)
    lane    16 bytes of ROWS rows and of UNROLL pieces at a time: ROWS * UNROLL loads in flight; one load of x serves ROWS rows

What the draft of this kernel lost, it lost at the ends, so:
    - the first weights are asked for while the launch before still runs (ptx.take_turn), and the next tile's before this tile's sums are taken;
    - the first weights of a pair's second matrix are asked for while the last of its first are multiplied;
    - while whole steps are left nothing is compared with the row's end: addresses are a running number and a constant;
    - bias, scale and residual are read before the loop, by the lane that will want them after it;
    - a block that has asked for its last weights fetches its share of the next launch's into L2 (job.py, `ahead`), so
      that memory works on while the grid ends and the next one starts.

K must be a multiple of 16 bytes; a lane beyond the row's end reads nothing, by a predicate.
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
from l1_kernels.sbi_gemm.job import PER_LOAD, Job, make_fetch_ahead, make_row_of, make_write, signature
from l1_kernels.sbi_gemm.prologue import HELD_PIECES, make_ask, make_norm, make_norm_held
from l1_kernels.sbi_gemm.words import ZEROS4, ZEROS8, make_load_x, make_numbers_of, make_unpack

ZERO, ONE = np.float32(0), np.float32(1)
reduce_sum, lane_index, warp_index = groups.reduce_sum, groups.lane, groups.warp


@dataclass(frozen=True, slots=True)
class Wide:
    """rows (a warp; even for a gated job), splits (warps that share a row), groups (of such warps in a block), unroll;
    blocks: on one multiprocessor, over which the tiles are dealt (0: a block a tile)."""

    rows: int = 2
    splits: int = 1
    groups: int = 4
    unroll: int = 2
    blocks: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.splits * self.groups

    @property
    def tile(self) -> int:
        """Rows of w in a tile."""
        return self.rows * self.groups

    def resident(self, job: Job, pieces: int) -> int:
        """Blocks of a multiprocessor that registers must leave room for: 24 warps, at most 85 registers a lane; 16 warps where
        two pieces of a norm's x, x in float32, or the addresses of a second matrix are held as well."""
        much = pieces > 1 or job.gated or job.pair is not None or not (job.carried or job.norm)
        return max(1, (16 if much else 24) * 32 // self.threads)

    def shared_bytes(self, job: Job, num_tokens: int, size: int) -> int:
        """Dynamic shared memory: the normalised x."""
        return size * (4 if job.dtype == "fp32" else 2) if job.norm else 0


@cache
def make_dot(dtype: str) -> Callable[..., Any]:
    """dot(words of w, numbers of x, sum) -> the sum, 16 bytes of weights further."""
    if dtype == "fp32":

        @cuda.jit(device=True, forceinline=True)
        def dot(w, x, total):
            return total + ((w[0] * x[0] + w[1] * x[1]) + (w[2] * x[2] + w[3] * x[3]))

    else:
        unpack = make_unpack(dtype)

        @cuda.jit(device=True, forceinline=True)
        def dot(words, x, total):
            w = unpack(words)
            low = (w[0] * x[0] + w[1] * x[1]) + (w[2] * x[2] + w[3] * x[3])
            return total + (low + ((w[4] * x[4] + w[5] * x[5]) + (w[6] * x[6] + w[7] * x[7])))

    return dot


@cache
def make_load_shared(dtype: str) -> Callable[..., Any]:
    """load_shared(shared, k, inside): the numbers of x at k that the norm left; zeros where not `inside`."""
    if dtype == "fp32":

        @cuda.jit(device=True, forceinline=True)
        def load_shared(shared, k, inside):
            return (shared[k], shared[k + 1], shared[k + 2], shared[k + 3]) if inside else ZEROS4

    else:
        unpack = make_unpack(dtype)

        @cuda.jit(device=True, forceinline=True)
        def load_shared(shared, k, inside):
            return unpack(ptx.load16_shared(shared, k >> 1)) if inside else ZEROS8

    return load_shared


@cache
def make_wide(job: Job, plan: Wide, pieces: int = 0) -> Callable[..., Any]:
    """kernel(*signature(job))[blocks, plan.threads, stream, plan.shared_bytes(...)] for fp32, fp16 and bf16 weights.
    pieces: K <= pieces * 8 * threads, and the norm keeps x in registers; 0: any K."""
    rows, splits, num_groups, unroll, tile_rows = plan.rows, plan.splits, plan.groups, plan.unroll, plan.tile
    per = PER_LOAD[job.dtype]
    hop = 32 * per * splits  # from a lane's piece to its next one
    step = hop * unroll
    held = rows * unroll * 4
    parts_size = 2 * splits * tile_rows
    word = types.float32 if job.dtype == "fp32" else types.uint32
    x_words = 4 if job.carried or job.dtype == "fp32" else 8
    x_word = types.uint32 if job.carried else types.float32
    held_x_size = x_words * unroll
    is_pair, is_inner, has_norm, split = job.pair == "rows", job.pair == "inner", job.norm is not None, splits > 1
    by_pair, settled, matrices = job.experts == "pairs", job.settled, 2 if job.gated else 1
    segments = 2 if is_inner else 1
    dealt = plan.blocks > 0  # otherwise a block has one tile, and nothing of a next one takes up registers
    load_w = make_load_x(4, False) if job.dtype == "fp32" else ptx.load16_stream_if
    load_inside = ptx.load16_floats if job.dtype == "fp32" else ptx.load16_stream
    dot, load_shared = make_dot(job.dtype), make_load_shared(job.dtype)
    load_x, numbers_of = make_load_x(x_words, job.carried), make_numbers_of(job.dtype, x_words, job.carried)
    norm = make_norm(job.norm or "rmsnorm", job.dtype, True)
    holds_norm, norm_size = job.norm is not None and pieces > 0, max(1, pieces) * 24
    ask, ask_x = make_ask(pieces, plan.threads)
    norm_held = make_norm_held(job.norm or "rmsnorm", job.dtype, pieces, plan.threads)
    fetch_ahead = make_fetch_ahead(job.dtype)
    row_of, row_of_first = make_row_of(job.gated, 1), make_row_of(job.gated and job.pair != "rows", 1)
    write_first, write_second = make_write(job, False), make_write(job, True)
    gated_first, gated_second = job.gated and not is_pair, job.gated

    @cuda.jit(device=True, forceinline=True)
    def find_rows(starts, first_slot, second, above, num_rows, size, first_k):
        """Where this lane's first piece of the warp's ROWS rows lies, of a matrix with `above` rows above it. A row past the last one is
        the last, read again and not written."""
        for r in range(rows):
            row = row_of(first_slot + r, num_rows) if second else row_of_first(first_slot + r, num_rows)
            starts[r] = np.int64(above + min(row, num_rows - 1)) * size + first_k

    @cuda.jit(device=True, forceinline=True)
    def advance(starts):
        for r in range(rows):
            starts[r] += step

    @cuda.jit(device=True, forceinline=True)
    def fetch(words, w, starts, k, size, u, checked):
        """Asks for piece u of the warp's ROWS rows; `checked`: where it lies inside."""
        for r in range(rows):
            v = load_w(w, starts[r] + u * hop, k + u * hop < size) if checked else load_inside(w, starts[r] + u * hop)
            at = (u * rows + r) * 4
            words[at], words[at + 1], words[at + 2], words[at + 3] = v[0], v[1], v[2], v[3]

    @cuda.jit(device=True, forceinline=True)
    def fetch_x(held_x, x, token, k, size, u, checked):
        """Asks for the numbers of x that piece u meets, with it: they would cost a wait of their own after it."""
        if not has_norm:
            v = load_x(x, token * size + k + u * hop, not checked or k + u * hop < size)
            for i in range(x_words):
                held_x[u * x_words + i] = v[i]

    @cuda.jit(device=True, forceinline=True)
    def ask_step(words, held_x, w, x, token, starts, first_k, size, with_x):
        """Asks for a row's first pieces."""
        for u in range(unroll):
            fetch(words, w, starts, first_k, size, u, True)
            if with_x:
                fetch_x(held_x, x, token, first_k, size, u, True)
        advance(starts)

    @cuda.jit(device=True, forceinline=True)
    def multiply(words, held_x, shared, k, size, u, sums, checked):
        """Piece u, which has come, with its part of x."""
        at = k + u * hop
        numbers = load_shared(shared, at, not checked or at < size) if has_norm else numbers_of(held_x, u * x_words)
        for r in range(rows):
            i = (u * rows + r) * 4
            sums[r] = dot((words[i], words[i + 1], words[i + 2], words[i + 3]), numbers, sums[r])

    @early()
    @cuda.jit(launch_bounds=(plan.threads, plan.resident(job, pieces)))
    def wide(
        x, xb, gain, shift, has_shift, gain_b, shift_b, has_shift_b, eps, eps_b, w, scale, bias, has_bias, y,
        wb, scale_b, bias_b, has_bias_b, yb, blocks_a, ahead, ahead_width, routes, share,
    ):  # fmt: skip
        parts = cuda.shared.array(parts_size, types.float32)
        shared = cuda.shared.array(0, word)
        starts = cuda.local.array(rows, types.int64)
        words = cuda.local.array(held, word)
        held_x = cuda.local.array(held_x_size, x_word)
        sums = cuda.local.array(rows, types.float32)
        lane, warp = lane_index(), warp_index()
        group = warp // splits
        first_k = ((warp - group * splits) * 32 + lane) * per
        second = False
        block, stride = cuda.blockIdx.x, cuda.gridDim.x
        if is_pair:
            second = block >= blocks_a
            if second:
                block -= blocks_a
                stride -= blocks_a
                w, bias, has_bias = wb, bias_b, has_bias_b
                gain, shift, has_shift, eps = gain_b, shift_b, has_shift_b, eps_b
            else:
                stride = blocks_a
        num_rows, size = w.shape
        above, token, written = np.int64(0), np.int64(0), np.int64(0)  # rows of w above this block's matrix; its rows of x and y
        if by_pair:
            num_rows = y.shape[1] * matrices
            written = np.int64(cuda.blockIdx.y)
            token = written // share
            if not settled:
                ptx.take_turn()
            above = np.int64(routes[written]) * num_rows
        num_tiles = (num_rows + tile_rows - 1) // tile_rows
        if block < num_tiles:
            find_rows(starts, block * tile_rows + group * rows, second, above, num_rows, size, first_k)
            ask_step(words, held_x, w, x, token, starts, first_k, size, False)
        if holds_norm:
            held_norm = cuda.local.array(norm_size, types.float32)
            ask(held_norm, size, gain, shift, has_shift)
        if not by_pair or settled:
            ptx.take_turn()
        if holds_norm:
            ask_x(held_norm, x, 0)
        if block < num_tiles:
            for u in range(unroll):
                fetch_x(held_x, x, token, first_k, size, u, True)
        if holds_norm:
            norm_held(held_norm, size, eps, shared, 0)
        elif has_norm:
            norm(x, gain, shift, has_shift, eps, shared, 0)
        parity = 0
        tile = block
        while tile < num_tiles:
            slot = tile * tile_rows + group * rows + lane  # lane r < ROWS ends the row of slot r
            mine = row_of(slot, num_rows) if second else row_of_first(slot, num_rows)
            ends = lane < rows and warp == group * splits and slot < num_rows
            added = ZERO
            if ends:
                if has_bias:
                    added = bias[above + mine]
                if is_inner and has_bias_b:
                    added += bias_b[mine]
            for r in range(rows):
                sums[r] = ZERO
            first_slot = tile * tile_rows + group * rows
            for segment in range(segments):
                w_now, x_now = w, x
                if is_inner and segment == 1:
                    w_now, x_now = wb, xb
                    size = wb.shape[1]
                done = np.int64(0)  # of the row; the same in all lanes, as the branches are
                while done + 2 * step <= size:
                    k = first_k + done
                    for u in range(unroll):  # the place that is free now takes its next piece at once
                        multiply(words, held_x, shared, k, size, u, sums, False)
                        fetch(words, w_now, starts, k + step, size, u, False)
                        fetch_x(held_x, x_now, token, k + step, size, u, False)
                    advance(starts)
                    done += step
                while done < size:
                    k = first_k + done
                    more = done + step < size
                    for u in range(unroll):
                        multiply(words, held_x, shared, k, size, u, sums, True)
                        if more:
                            fetch(words, w_now, starts, k + step, size, u, True)
                            fetch_x(held_x, x_now, token, k + step, size, u, True)
                        elif is_inner and segment == 0:
                            if u == 0:
                                find_rows(starts, first_slot, second, above, num_rows, wb.shape[1], first_k)
                            fetch(words, wb, starts, first_k, wb.shape[1], u, True)
                            fetch_x(held_x, xb, token, first_k, wb.shape[1], u, True)
                    advance(starts)
                    done += step
            if is_inner:
                size = w.shape[1]
            if dealt and tile + stride < num_tiles:
                find_rows(starts, first_slot + stride * tile_rows, second, above, num_rows, size, first_k)
                ask_step(words, held_x, w, x, token, starts, first_k, size, True)
            else:
                fetch_ahead(ahead, ahead_width)
            total = ZERO
            for r in range(rows):
                whole = reduce_sum(sums[r])
                if lane == r:
                    total = whole
            if split:
                base = (parity * num_groups + group) * splits * rows
                if lane < rows:
                    parts[base + (warp - group * splits) * rows + lane] = total
                cuda.syncthreads()  # one a tile: the next tile's parts go to the other half
                if lane < rows and warp == group * splits:
                    total = ZERO
                    for s in range(splits):
                        total += parts[base + s * rows + lane]
                parity = 1 - parity
            if warp == group * splits:
                total += added
                if is_pair and second:
                    up = groups.shfl_down(total, 1)
                    if ends and not (gated_second and (lane & 1)):
                        write_second(yb, 0, mine, total, up)
                else:
                    up = groups.shfl_down(total, 1)
                    if ends and not (gated_first and (lane & 1)):
                        write_first(y, written, mine, total, up)
            if not dealt:
                break
            tile += stride

    return wide


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for name, job in example_jobs(("fp32", "fp16", "bf16")):
        plan = Wide(2, 2, 4, 2)
        yield f"wide_{name}", make_wide(job, plan), signature(job)
        if job.norm:
            for pieces in (1, HELD_PIECES):
                yield f"wide_{name}_held_{pieces}", make_wide(job, Wide(2, 1, 8, 2), pieces), signature(job)
    for name, job in expert_jobs(("fp32", "fp16", "bf16"), ("pairs",)):
        yield f"wide_{name}", make_wide(job, Wide(2, 2, 4, 2)), signature(job)
    yield "wide_fp16_4_rows", make_wide(Job("fp16", norm="layernorm"), Wide(4, 1, 8, 2)), signature(Job("fp16", norm="layernorm"))


def example_jobs(dtypes: tuple[str, ...]) -> Iterator[tuple[str, Job]]:
    """One job for each region of a layer, so that all prologues and epilogues are compiled."""
    for dtype in dtypes:
        yield f"{dtype}_norm", Job(dtype, norm="layernorm")
        yield f"{dtype}_norm_activation", Job(dtype, norm="layernorm", activation="gelu_new", carries=True)
        yield f"{dtype}_norm_gated", Job(dtype, norm="rmsnorm", activation="silu", gated=True, carries=True)
        yield f"{dtype}_add", Job(dtype, carried=True, add=True)
        yield f"{dtype}_plain", Job(dtype)
        yield f"{dtype}_pair", Job(dtype, norm="layernorm", activation="gelu", carries=True, pair="rows")
        yield f"{dtype}_inner", Job(dtype, carried=True, add=True, pair="inner")


def expert_jobs(dtypes: tuple[str, ...], kinds: tuple[str, ...]) -> Iterator[tuple[str, Job]]:
    """What a mixture of experts launches."""
    for dtype in dtypes:
        bits = dtype != "fp32"
        for kind in kinds:
            yield f"{dtype}_{kind}_up", Job(dtype, carried=bits, activation="silu", gated=True, carries=bits, experts=kind, gathers=kind == "active")
            yield f"{dtype}_{kind}_plain_up", Job(dtype, carried=bits, activation="gelu", carries=bits, experts=kind, gathers=kind == "active")
            yield f"{dtype}_{kind}_down", Job(dtype, carried=bits, experts=kind, settled=True)
