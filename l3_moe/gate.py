"""The gate of few tokens, one launch: norm, gate product, softmax, top k and routing tables; and the normed rows in 16 bits, which the experts read.

    rows[t] = norm(x[t])     logits = norm(x[t]) @ gate^T, all float32     experts, share = the top k of the logits     slots, routes: the tables

x float32 [T, D], gate float32 [E, D], logits float32 [T, E], rows [T, D] in the carrier of `dtype`, experts and slots int32 [T, k], share float32 [T, k], routes int32
[2 A + 1 + T k] (`Routes`): all in global memory. Reads the gate and x once for each token, from L2 beyond the first time, so it is for few tokens. Bound by latency, a chain of
barriers: two for the norm, which every block makes again, one for the logits, the arrival of the last block, k rounds of a warp for each token, two
for the tables (paper, Section V-C: the gate as one kernel).

    block (b, t)    WARPS parts of E * SPLITS: an expert, and of its row every SPLITS-th step of 1024 numbers
    warp            a part: 4 numbers a lane of PIECES pieces of 128, the first step of which is under way before the launch's turn
    last to arrive  a warp a token chooses; then a thread an expert counts, and says where its rows lie
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import checks, groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, I32_1D, I32_2D, array_type, storer
from l1_kernels.checks import FLOAT32
from l1_kernels.cuda_api import cuda, early
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm.prologue import HELD_PIECES, make_ask, make_norm_held, pieces_of
from l1_kernels.weight import CARRIER, Array, Weight
from l3_moe.choose import make_choose

THREADS = 512
WARPS = THREADS // 32
PIECES = 8
STEP = PIECES * 128  # numbers of a warp's step
MOST_SPLITS = 4
MOST_PAIRS = 256  # (token, expert) pairs, whose experts lie in shared memory for the tables
SHARED_LIMIT = 44 * 1024  # beside the tables'
ZERO = np.float32(0)
reduce_sum, inclusive_scan, lane_index, warp_index = groups.reduce_sum, groups.inclusive_scan, groups.lane, groups.warp


@dataclass(frozen=True, slots=True)
class Routes:
    """The tables of few tokens, for the experts that have any (Job.experts "active" of l1_kernels/sbi_gemm). int32, on the device.

    slots    [T, k]          pair (t, j) -> its row; rows go expert by expert, within one by ascending t
    routes   [2 A + 1 + P]   the A = min(E, P) places: the a-th expert with rows, or -1; where its rows begin, and where the last one's end; row -> t * k + j
    """

    slots: Array
    routes: Array
    count: int  # A

    @property
    def sources(self) -> Array:
        return self.routes[2 * self.count + 1 :]


def splits_of(size: int) -> int:
    """Warps that share an expert's row: a step each, as far as that goes."""
    splits = 1
    while splits < MOST_SPLITS and splits * STEP < size:
        splits *= 2
    return splits


def takes(size: int, num_experts: int, num_pairs: int) -> bool:
    """Whether the kernel does a gate [E, D] for so many (token, expert) pairs."""
    fits = size % 8 == 0 and pieces_of(size, THREADS) > 0 and 4 * size <= SHARED_LIMIT
    return fits and num_experts <= THREADS and num_pairs <= MOST_PAIRS


@cache
def make_gate(kind: str, dtype: str, pieces: int, splits: int, alone: bool = False) -> Callable[..., Any]:
    """kernel(x, gain, shift, has_shift, eps, gate, over_all, arrivals, logits, rows, experts, share, slots, routes)
    [(ceil(E * splits / WARPS), T), THREADS, stream, 4 * D]; arrivals int32, one zero, which is zero again afterwards.
    alone: the grid is one block. Nothing goes through memory then, and no tables are made: one token's pairs are its rows."""
    ask, ask_x = make_ask(pieces, THREADS)
    norm_held = make_norm_held(kind, "fp32", pieces, THREADS)
    choose, store = make_choose(), storer(dtype)
    norm_size, held_size, here = pieces * 24, PIECES * 4, WARPS // splits

    @cuda.jit(device=True, forceinline=True)
    def fetch(held, gate, part, base, size):
        """Asks for a step of a part's row; zeros beyond its end."""
        row = np.int64(part // splits) * size
        for p in range(PIECES):
            k = base + p * 128 + lane_index() * 4
            held[p * 4], held[p * 4 + 1], held[p * 4 + 2], held[p * 4 + 3] = ZERO, ZERO, ZERO, ZERO
            if k < size:
                a, b, c, d = ptx.load16_floats(gate, row + k)
                held[p * 4], held[p * 4 + 1], held[p * 4 + 2], held[p * 4 + 3] = a, b, c, d

    @cuda.jit(device=True, forceinline=True)
    def multiply(held, shared, base, size):
        total = ZERO
        for p in range(PIECES):
            k = base + p * 128 + lane_index() * 4
            if k < size:
                for i in range(4):
                    total += held[p * 4 + i] * shared[k + i]
        return total

    @cuda.jit(device=True)
    def make_tables(experts, num_experts, slots, routes):
        """By one block, from experts [T, k]: a thread an expert."""
        chosen = cuda.shared.array(MOST_PAIRS, types.int32)
        sums = cuda.shared.array(WARPS, types.int32)
        num_pairs, top_k = slots.shape[0] * slots.shape[1], slots.shape[1]
        places = min(num_experts, num_pairs)
        e, warp = cuda.threadIdx.x, warp_index()
        if e < num_pairs:
            chosen[e] = experts[e // top_k, e % top_k]
        cuda.syncthreads()
        mine = np.int32(0)
        if e < num_experts:
            for p in range(num_pairs):
                mine += np.int32(1) if chosen[p] == e else np.int32(0)
        both = mine + (np.int32(1 << 16) if mine > 0 else np.int32(0))  # rows, and experts that have any, in one scan
        before = inclusive_scan(both)
        if lane_index() == 31:
            sums[warp] = before
        cuda.syncthreads()
        before -= both
        for w in range(warp):
            before += sums[w]
        if e < places:
            routes[e] = -1
        cuda.syncthreads()
        if mine > 0:
            row, place = before & 0xFFFF, before >> 16
            routes[place] = e
            routes[places + place], routes[places + place + 1] = row, row + mine  # the next expert's start is this one's end
            for p in range(num_pairs):
                if chosen[p] == e:
                    slots[p // top_k, p % top_k] = row
                    routes[2 * places + 1 + row] = p
                    row += 1

    @early()
    @cuda.jit(launch_bounds=(THREADS, 1))
    def gate_few(x, gain, shift, has_shift, eps, gate, over_all, arrivals, logits, rows, experts, share, slots, routes):
        shared = cuda.shared.array(0, types.float32)
        sums = cuda.shared.array(WARPS, types.float32)
        is_last = cuda.shared.array(1, types.int32)
        few = cuda.shared.array((1, WARPS), types.float32)  # the logits of one block
        held_norm = cuda.local.array(norm_size, types.float32)
        held = cuda.local.array(held_size, types.float32)
        lane, warp, t = lane_index(), warp_index(), cuda.blockIdx.y
        num_experts, size = gate.shape
        part = cuda.blockIdx.x * WARPS + warp
        mine, first = part < num_experts * splits, (part % splits) * STEP
        ask(held_norm, size, gain, shift, has_shift)
        if mine:
            fetch(held, gate, part, first, size)
        ptx.take_turn()
        ask_x(held_norm, x, t)
        norm_held(held_norm, size, eps, shared, 0)
        if cuda.blockIdx.x == 0:
            for k in range(cuda.threadIdx.x, size, THREADS):
                rows[t, k] = store(shared[k])
        total = ZERO
        if mine:
            total = multiply(held, shared, first, size)
            for base in range(first + splits * STEP, size, splits * STEP):
                fetch(held, gate, part, base, size)
                total += multiply(held, shared, base, size)
        total = reduce_sum(total)
        if lane == 0:
            sums[warp] = total
        cuda.syncthreads()
        e = cuda.blockIdx.x * here + cuda.threadIdx.x
        if cuda.threadIdx.x < here and e < num_experts:
            total = ZERO
            for s in range(splits):
                total += sums[cuda.threadIdx.x * splits + s]
            if alone:
                few[0, e] = total
            else:
                logits[t, e] = total
        cuda.syncthreads()
        if alone:
            if warp == 0:
                choose(few, 0, num_experts, over_all, experts, share)
            return
        if cuda.threadIdx.x == 0:
            blocks = cuda.gridDim.x * cuda.gridDim.y
            is_last[0] = 1 if ptx.fetch_add_release(arrivals, 0, 1) == blocks - 1 else 0
            if is_last[0] == 1:
                arrivals[0] = 0
        cuda.syncthreads()
        if is_last[0] == 0:
            return
        for token in range(warp, x.shape[0], WARPS):
            choose(logits, token, num_experts, over_all, experts, share)
        cuda.syncthreads()
        make_tables(experts, num_experts, slots, routes)

    return gate_few


def gate_few(
    kernels: GpuKernels, x: Array, norm: NormArgs, gate: Weight, top_k: int, over_all: bool, dtype: str
) -> tuple[Array, Array, Array, Routes]:
    """(rows [T, D] in the carrier of `dtype`, experts int32 [T, k], share float32 [T, k], the tables, which one token's are not filled)."""
    checks.matrix(gate, "gate")
    num_experts, size = gate.data.shape
    checks.ranked(x, "x", FLOAT32, 2)
    num_tokens = x.shape[0]
    checks.array(x, "x", FLOAT32, (num_tokens, size))
    checks.array(norm.weight, "norm.weight", FLOAT32, (size,))
    if norm.bias is not None:
        checks.array(norm.bias, "norm.bias", FLOAT32, (size,))
    if not 1 <= top_k <= num_experts:
        checks.reject("top_k", f"in 1..{num_experts} (gate's E)", top_k)
    if gate.dtype != "fp32" or not takes(size, num_experts, top_k):
        checks.reject("gate", f"float32 [E, D], E up to {THREADS}, D a multiple of 8 and up to {8 * THREADS * HELD_PIECES}", checks.describe(gate.data))
    if num_tokens * top_k > MOST_PAIRS:
        checks.reject("x", f"of at most {MOST_PAIRS // top_k} tokens", checks.describe(x))
    new, places = kernels.new, min(num_experts, num_tokens * top_k)
    rows, logits = new(x.shape, CARRIER[dtype]), new((num_tokens, num_experts), np.float32)
    experts, share = new((num_tokens, top_k), np.int32), new((num_tokens, top_k), np.float32)
    tables = Routes(new((num_tokens, top_k), np.int32), new((2 * places + 1 + num_tokens * top_k,), np.int32), places)
    splits = splits_of(size)
    grid = (ceil_div(num_experts * splits, WARPS), num_tokens)
    kernels.launch(
        make_gate(norm.kind, dtype, pieces_of(size, THREADS), splits, grid == (1, 1)), grid, THREADS, 4 * size,
        x, norm.weight, kernels.or_absent(norm.bias), norm.bias is not None, np.float32(norm.eps), gate.data, over_all, kernels.zero_counts(), logits,
        rows, experts, share, tables.slots, tables.routes,
    )  # fmt: skip
    return rows, experts, share, tables


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    norm = (F32_2D, F32_1D, F32_1D, types.boolean, types.float32)
    for kind, dtype, pieces, splits in (
        ("layernorm", "fp16", 1, 1), ("rmsnorm", "fp16", 1, 2), ("rmsnorm", "bf16", HELD_PIECES, MOST_SPLITS), ("layernorm", "bf16", 1, 2),
        ("rmsnorm", "fp32", 1, 2), ("layernorm", "fp32", HELD_PIECES, MOST_SPLITS),
    ):  # fmt: skip
        arguments = (*norm, F32_2D, types.boolean, I32_1D, F32_2D, array_type(dtype, 2), I32_2D, F32_2D, I32_2D, I32_1D)
        yield f"gate_{kind}_{dtype}_{pieces}_{splits}", make_gate(kind, dtype, pieces, splits), arguments
    arguments = (*norm, F32_2D, types.boolean, I32_1D, F32_2D, array_type("fp16", 2), I32_2D, F32_2D, I32_2D, I32_1D)
    yield "gate_rmsnorm_fp16_alone", make_gate("rmsnorm", "fp16", 1, 2, True), arguments
