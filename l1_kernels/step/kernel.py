"""The step kernel: a block on every multiprocessor, one warp that feeds and `warps` that work, until the program is done.

    kernel(program, num_tokens, x_numbers, ring, stages, counter, work, arrivals)[blocks, 32 * (warps + 1), stream, shared_bytes]

program     int64 [operations, WIDTH] (program.py)
x_numbers   of a token, a multiple of 64, that shared memory has room for; ring: the byte at which the weights' ring begins
stages      of the ring; all four int32
counter     int32 [1], the grid's barrier: zero before the first launch, and not touched in between
work        float32, arrivals int32 (zeros, left as zeros): of attention over stretches

All blocks must be on the GPU at the same time, or the first barrier waits for ever (together.py gives up after seconds).
Bound by the bytes of the weights, if each barrier's wait is shorter than what the ring holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import feed_ptx, groups, ptx
from l1_kernels.carrier import F32_1D, I32_1D
from l1_kernels.cuda_api import cuda
from l1_kernels.sbi_gemm.job import CARRIED
from l1_kernels.step.attend import make_attend
from l1_kernels.step.gemm import EMPTY, make_feed, make_gemm
from l1_kernels.step.program import GEMM, KIND, WAITS, WIDTH
from l1_kernels.step.together import arrive, make_together

LEAST_CAPABILITY = "90"  # mbarrier.try_wait
ROWS_SIZE = 2 * WIDTH
BARS = 2 * EMPTY  # bytes of the mbarriers, before x
warp_index = groups.warp


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for.

    dtype, cache_dtype   of weights ("fp16", "bf16", "int8"), of keys and values ("fp16", "bf16")
    norm, activation     of all operations that have one; activation None: none has
    columns              1: up to 8 tokens, 2: up to 16
    lanes, heads         of attention: lanes a key, query heads a block (attention/decode.py)
    warps                that work
    """

    dtype: str
    cache_dtype: str
    norm: str
    activation: str | None
    columns: int
    lanes: int
    heads: int
    warps: int = 15


SIGNATURE = (
    types.Array(types.int64, 2, "C"), types.int32, types.int32, types.int32, types.int32, I32_1D, F32_1D, I32_1D,
)  # fmt: skip


@cache
def make_step(kind: Kind) -> Callable[..., Any]:
    warps = kind.warps
    feed = make_feed(kind.dtype, warps)
    gemm = make_gemm(kind.dtype, kind.norm, kind.activation, kind.columns, warps)
    attend = make_attend(kind.cache_dtype, CARRIED[kind.dtype], kind.lanes, kind.heads, warps)
    meet, _ = make_together(warps)
    bounds = (32 * (warps + 1), 1)

    @cuda.jit(launch_bounds=bounds)
    def step(program, num_tokens, x_numbers, ring, stages, counter, work, arrivals):
        shared = cuda.shared.array(0, types.uint32)
        base = np.int32(feed_ptx.shared_address(shared, 0))
        if cuda.threadIdx.x == 0:
            for s in range(stages):
                feed_ptx.barrier_init(np.uint32(base + s * 8), np.uint32(32))
                feed_ptx.barrier_init(np.uint32(base + EMPTY + s * 8), np.uint32(warps))
        cuda.syncthreads()
        if warp_index() == warps:
            feed(program, base, np.int32(base + ring), x_numbers, stages)
            return
        x_first = np.int32(base + BARS)
        # Rows of the program pass through shared memory, each asked for while the one before is worked off.
        rows = cuda.shared.array(ROWS_SIZE, types.int64)
        thread, num_ops = cuda.threadIdx.x, program.shape[0]
        if thread < WIDTH:
            rows[thread] = program[0, thread]
        meet()
        seen = ptx.load_acquire(counter, 0)
        slot, parity, half = np.int32(0), np.int32(0), np.int32(0)
        waits = False
        for op in range(num_ops):
            row, other = (op & 1) * WIDTH, (1 - (op & 1)) * WIDTH
            ahead = np.int64(0)
            if thread < WIDTH and op + 1 < num_ops:
                ahead = program[op + 1, thread]
            if rows[row + KIND] == GEMM:
                seen, slot, parity, half = gemm(
                    rows, row, waits, num_tokens, base, x_first, np.int32(base + ring), x_numbers, stages, counter, seen, slot, parity, half
                )
            else:
                seen = attend(rows, row, waits, num_tokens, x_first, counter, seen, work, arrivals)
            if thread < WIDTH:
                rows[other + thread] = ahead
            meet()  # nothing of this operation is still read, and what it wrote is written
            waits = op + 1 < num_ops and rows[other + WAITS] != 0
            if waits:
                arrive(counter)

    return step


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    kinds = [
        Kind("fp16", "fp16", "layernorm", "gelu_new", 1, 8, 1),
        Kind("fp16", "fp16", "layernorm", "gelu_new", 1, 32, 1),
        Kind("fp16", "fp16", "layernorm", "gelu_new", 2, 32, 1),
        Kind("bf16", "bf16", "rmsnorm", "silu", 2, 16, 2),
        Kind("int8", "fp16", "rmsnorm", "silu", 1, 16, 2),
        Kind("int8", "fp16", "layernorm", "gelu", 2, 32, 2),
    ]
    for kind in kinds:
        name = f"step_{kind.dtype}_{kind.norm}_{kind.activation}_{8 * kind.columns}_{8 * kind.lanes}_{kind.heads}"
        yield name, make_step(kind), SIGNATURE
