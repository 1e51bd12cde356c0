"""residual[t] += sum over ranks r of x_r[t];   rows[t] = round(norm(residual[t]))

What a layer does after an all-reduce, in the launch that sums: the residual, and the norm that the next region begins with, in the 16 bits that
its GeMM reads. x, residual float32 [T, D] and rows [T, D] in the carrier, in each rank's global memory. The same bits as by a sum with `add` (gpu.py)
and the norm's own launch (sbi_gemm/prologue.py, make_norm_rows), whose code this is.

Sends and receives 4 T D (p - 1) bytes a rank, reads 8 T D and writes 6 T D besides. Bound by latency: a launch less than sum and norm by themselves.

    block t   -> token t, whose norm wants the whole row, with block t of the other ranks
    thread i  -> eight neighbours, in registers from the first load to the rounding

Its places in the window are its own (`norm_layout`), apart from those of sums, whose blocks hold other numbers. Rejected: D that is no multiple of 8 or
more than MAX_WIDTH, more than MAX_TOKENS tokens, misaligned arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from numba import types

from l1_kernels import ptx
from l1_kernels.carrier import F32_1D, F32_2D, I32_1D, array_type
from l1_kernels.cuda_api import cuda, early
from l1_kernels.peer_reduce.exchange import make_exchange
from l1_kernels.peer_reduce.gpu import I64_1D
from l1_kernels.peer_reduce.layout import norm_layout
from l1_kernels.sbi_gemm.prologue import make_ask, make_norm_held
from l1_kernels.sbi_gemm.words import ZEROS4

HALF = 12  # from a thread's first four numbers to its second, in what prologue.make_ask holds


@cache
def make_norm_block(ranks: int, kind: str, dtype: str, threads: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(ask, norm_block). ask(held, size, gain, shift, has_shift): the loads that wait for nobody.
    norm_block(held, x, residual, eps, rows, me, token, window, windows, most_polls): the work of one block of rank `me`."""
    open_epoch, push, meet, total = make_exchange(norm_layout(ranks))
    ask, _ = make_ask(1, threads)
    norm_held = make_norm_held(kind, dtype, 1, threads, True)

    @cuda.jit(device=True, forceinline=True)
    def put(held, at, four):
        held[at], held[at + 1], held[at + 2], held[at + 3] = four[0], four[1], four[2], four[3]

    @cuda.jit(device=True, forceinline=True)
    def norm_block(held, x, residual, eps, rows, me, token, window, windows, most_polls):
        size = x.shape[1]
        at = 8 * cuda.threadIdx.x
        first = token * size + at
        inside = at < size
        epoch = open_epoch(window, token)
        for half in range(2):
            put(held, HALF * half, ZEROS4)
            if inside:
                own = ptx.load16_floats(x, first + 4 * half)
                push(windows, me, token, epoch, at + 4 * half, own)
                put(held, HALF * half, own)
        meet(window, windows, me, token, epoch, most_polls)
        if inside:
            for half in range(2):
                h = HALF * half
                before = ptx.load16_floats(residual, first + 4 * half)  # under way with the peers' parts; sooner it would take registers that are needed
                sums = total(window, me, token, epoch, at + 4 * half, (held[h], held[h + 1], held[h + 2], held[h + 3]))
                put(held, h, (before[0] + sums[0], before[1] + sums[1], before[2] + sums[2], before[3] + sums[3]))
                ptx.store16_floats(residual, first + 4 * half, (held[h], held[h + 1], held[h + 2], held[h + 3]))
        norm_held(held, size, eps, rows, token * size)

    return ask, norm_block


@cache
def make_norm_sum(ranks: int, kind: str, dtype: str, threads: int) -> Callable[..., Any]:
    """kernel(x, residual, gain, shift, has_shift, eps, rows, me, window, windows, most_polls)[T, threads], D <= 8 * threads."""
    ask, norm_block = make_norm_block(ranks, kind, dtype, threads)

    @early()
    @cuda.jit(launch_bounds=(threads, 1))  # or a block of 1024 threads has more registers than there are
    def peer_sum_norm(x, residual, gain, shift, has_shift, eps, rows, me, window, windows, most_polls):
        held = cuda.local.array(24, types.float32)
        ask(held, x.shape[1], gain, shift, has_shift)
        ptx.take_turn()
        norm_block(held, x, residual, eps, rows, me, cuda.blockIdx.x, window, windows, most_polls)

    return peer_sum_norm


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for ranks, kind, dtype, threads in ((2, "rmsnorm", "bf16", 512), (8, "layernorm", "fp16", 1024)):
        signature = (
            F32_2D, F32_2D, F32_1D, F32_1D, types.boolean, types.float32, array_type(dtype, 2), types.int64, I32_1D, I64_1D, types.int64,
        )  # fmt: skip
        yield f"peer_sum_{kind}_{ranks}_{dtype}", make_norm_sum(ranks, kind, dtype, threads), signature
