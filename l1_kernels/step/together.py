"""Who waits for whom in the step kernel: the working warps of a block, and all blocks between two operations.

A round of the grid's barrier adds 2^31 to its counter, whatever the grid, so the sign turns when the last block has come
(groups.grid_sync does the same). Here arriving and waiting are two calls, and nobody waits for the addition's answer: each
block remembers the counter's sign.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from l1_kernels import feed_ptx, ptx
from l1_kernels.cuda_api import cuda

MAX_POLLS = 1 << 26  # some ten seconds; then the kernel gives up
WORKERS = 1  # the number of the hardware barrier


@cuda.jit(device=True, forceinline=True)
def arrive(counter):
    """The block is done with the operation, the barrier's first half; after a `meet`, and by one thread."""
    if cuda.threadIdx.x == 0:
        amount = np.int32(1)
        if cuda.blockIdx.x == 0:
            amount = np.int32(2147483647 - (cuda.gridDim.x - 1)) + np.int32(1)  # one block alone: it wraps, as it must
        ptx.add_release(counter, 0, amount)


@cache
def make_together(warps: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(meet, wait) for `warps` working warps.

    meet()                    all workers of the block have come, and see what the others wrote
    wait(counter, seen)       all blocks are: returns what to pass as `seen` the next time (first: the counter before the
                              block's first arrival)
    """
    threads = warps * 32

    @cuda.jit(device=True, forceinline=True)
    def meet():
        feed_ptx.named_barrier(WORKERS, threads)

    @cuda.jit(device=True, forceinline=True)
    def wait(counter, seen):
        if cuda.threadIdx.x == 0:
            polls = 0
            now = ptx.load_acquire(counter, 0)
            while (seen ^ now) >= 0:
                polls += 1
                if polls > MAX_POLLS:
                    ptx.trap()
                now = ptx.load_acquire(counter, 0)
            seen = now
        meet()
        return seen

    return meet, wait
