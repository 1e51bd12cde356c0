"""x[i] = sum over ranks r of x_r[i];   or, with `add`, residual[i] += that sum

One-shot all-reduce of small messages: every rank sends all of x to every other one and adds by itself, in one launch. float32, flat, of any
length up to MAX_NUMBERS; the same bits on all ranks. x lies in each rank's global memory, as does its window (layout.py).

Sends and receives 4 n (p - 1) bytes a rank of n numbers and p ranks; a ring would send 8 n (p - 1) / p, in 2 (p - 1) steps. Bound by latency: one
way over the link for the numbers, one for the flag behind them.

    block b   -> numbers [b, b + 1) * CHUNK, with block b of the other ranks (exchange.py)
    thread t  -> four of them in one access of 16 bytes; the last four may be fewer, and x misaligned: then one by one

Blocks wait for peers' blocks of the same number, so all of a rank's blocks must find room on its GPU at once: there are 64 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import ptx
from l1_kernels.carrier import F32_1D, I32_1D
from l1_kernels.cuda_api import cuda, early
from l1_kernels.peer_reduce.exchange import make_exchange
from l1_kernels.peer_reduce.layout import CHUNK, sum_layout

ZERO = np.float32(0)


@cuda.jit(device=True)
def load_four(x, i, aligned):
    """x[i .. i + 3], zeros past the end."""
    size = x.shape[0]
    if aligned and i + 4 <= size:
        return ptx.load16_floats(x, i)
    return (
        x[i] if i < size else ZERO, x[i + 1] if i + 1 < size else ZERO,
        x[i + 2] if i + 2 < size else ZERO, x[i + 3] if i + 3 < size else ZERO,
    )  # fmt: skip


@cuda.jit(device=True)
def store_four(x, i, aligned, four):
    size = x.shape[0]
    if aligned and i + 4 <= size:
        ptx.store16_floats(x, i, four)
    else:
        for k in range(4):
            if i + k < size:
                x[i + k] = four[k]


@cache
def make_sum_block(ranks: int, add: bool) -> Callable[..., Any]:
    """sum_block(x, residual, aligned, me, block, window, windows, most_polls): the work of one block of rank `me`. Without `add` the sum
    goes to x, and residual is not looked at."""
    open_epoch, push, meet, total = make_exchange(sum_layout(ranks))

    @cuda.jit(device=True, forceinline=True)
    def sum_block(x, residual, aligned, me, block, window, windows, most_polls):
        at = 4 * cuda.threadIdx.x
        i = block * CHUNK + at
        inside = i < x.shape[0]
        epoch = open_epoch(window, block)
        own = load_four(x, i, aligned)
        before = own
        if inside:
            push(windows, me, block, epoch, at, own)
            if add:
                before = load_four(residual, i, aligned)
        meet(window, windows, me, block, epoch, most_polls)
        if inside:
            a, b, c, d = total(window, me, block, epoch, at, own)
            if add:
                store_four(residual, i, aligned, (before[0] + a, before[1] + b, before[2] + c, before[3] + d))
            else:
                store_four(x, i, aligned, (a, b, c, d))

    return sum_block


@cache
def make_sum(ranks: int, add: bool) -> Callable[..., Any]:
    """kernel(x, residual, aligned, me, window, windows, most_polls)[ceil(n / CHUNK), THREADS]; aligned: x and residual at multiples of 16 bytes."""
    sum_block = make_sum_block(ranks, add)

    @early()
    @cuda.jit
    def peer_sum(x, residual, aligned, me, window, windows, most_polls):
        ptx.take_turn()
        sum_block(x, residual, aligned, me, cuda.blockIdx.x, window, windows, most_polls)

    return peer_sum


I64_1D = types.Array(types.int64, 1, "C")


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    signature = (F32_1D, F32_1D, types.boolean, types.int64, I32_1D, I64_1D, types.int64)
    for ranks in (2, 8):
        for add in (False, True):
            yield f"peer_sum_{ranks}{'_add' if add else ''}", make_sum(ranks, add), signature
