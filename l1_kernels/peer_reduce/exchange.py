"""How a block hands its numbers to the same block of the other ranks, and gets theirs: three device functions.

    open    the block's epoch, one more than the last time
    push    four numbers into every peer's window, at this rank's place: stores over the link, which nobody waits for
    meet    all threads have pushed; a flag to each peer says so; wait until all peers' flags are here
    total   the four numbers of each rank, added in rank order: all ranks get the same bits

Pushed, not fetched: after the flag a peer reads its own memory, and the link's latency is paid once. A part is written before its flag
(a barrier of the block, then a release), and read after it (an acquire, then a barrier).

Two slots, by the epoch's parity, suffice. Rank q writes to slot e % 2 again in epoch e + 2. Before, it went through epoch e + 1, that is, had
this rank's flag of e + 1; which this rank's block raised in a launch after the one in which it read the parts of epoch e. Nor can q's flag of
e + 2 come over that of e too soon: q needs this rank's of e + 1 first, so this rank had left e. Thus a flag is waited for by equality, and
an epoch that wraps around does no harm.

The epoch is in memory, not an argument: a CUDA graph replays its arguments, and the epoch must go on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from l1_kernels import ptx
from l1_kernels.cuda_api import cuda
from l1_kernels.peer_reduce.layout import MAX_RANKS, Layout

MAX_POLLS = 1 << 32  # minutes: a peer may be busy compiling; whether it still lives is for the host to watch


@cache
def make_exchange(layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(open_epoch, push, meet, total) for windows of this layout. window: this rank's, int32; windows: the address of each rank's, int64 [ranks]."""
    ranks, blocks, chunk = layout.ranks, layout.blocks, layout.chunk
    first, flags, parts = layout.first, layout.flags, layout.parts

    @cuda.jit(device=True, forceinline=True)
    def open_epoch(window, block):
        return np.int32(window[first + block] + np.int32(1))

    @cuda.jit(device=True, forceinline=True)
    def place(rank, block, epoch, at):
        """The word where rank's numbers from `at` on lie."""
        return parts + (((epoch & 1) * ranks + rank) * blocks + block) * chunk + at

    @cuda.jit(device=True, forceinline=True)
    def push(windows, me, block, epoch, at, four):
        word = place(me, block, epoch, at)
        for r in range(ranks):
            if r != me:
                ptx.store16_floats_at(windows[r] + 4 * word, four)

    @cuda.jit(device=True, forceinline=True)
    def meet(window, windows, me, block, epoch, most_polls):
        cuda.syncthreads()
        r = cuda.threadIdx.x  # a thread for each peer
        if r < ranks and r != me:
            flag = flags + ((epoch & 1) * blocks + block) * MAX_RANKS
            ptx.store_release_system_at(windows[r] + 4 * (flag + me), epoch)
            polls = 0
            while ptx.load_acquire_system(window, flag + r) != epoch:
                polls += 1
                if polls > most_polls:
                    ptx.trap()
        if r == 0:
            window[first + block] = epoch
        cuda.syncthreads()

    @cuda.jit(device=True, forceinline=True)
    def total(window, me, block, epoch, at, four):
        a, b, c, d = four
        for r in range(ranks):
            e, f, g, h = four
            if r != me:
                e, f, g, h = ptx.load16_floats(window, place(r, block, epoch, at))
            if r == 0:
                a, b, c, d = e, f, g, h
            else:
                a, b, c, d = a + e, b + f, c + g, d + h
        return a, b, c, d

    return open_epoch, push, meet, total
