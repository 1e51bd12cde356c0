"""tokens[b] = the lowest v with logits[b, v] = max over V, or -1 where that is not a number;  then each slot moves on

logits float32 [B, V] in global memory, the slots (slots.py) too, but `ring` in the host's, which the GPU writes to over the
bus. Reads 4*B*V bytes, writes 24 a slot; B*V comparisons. One block reads a row, by 8 loads of each thread at a time.

    block b -> slot b; thread t looks at v = t, t + threads, ...; the largest of the block first, then the lowest of its places
    thread 0 writes the token where the next step reads it, and where the host reads it behind

So the next step can begin with no word from the host (design, section 6: --graph).
The launcher rejects: logits that are not float32 [B, V], V = 0, slots of other lengths. B = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups
from l1_kernels.carrier import F32_2D, I32_1D, I32_2D
from l1_kernels.cuda_api import cuda

INFINITY = np.float32(np.inf)
MAX_THREADS = 1024
LOADS = 8  # of a thread at a time
NOWHERE = 2147483647
block_max, reduce_max, lane_index, warp_index, num_warps = groups.block_max, groups.reduce_max, groups.lane, groups.warp, groups.num_warps


@cuda.jit(device=True)
def block_lowest(place):
    """The lowest int32 of the block, in every thread."""
    scratch = cuda.shared.array(32, np.int32)
    lowest = -reduce_max(np.int32(-place))
    if lane_index() == 0:
        scratch[warp_index()] = lowest
    cuda.syncthreads()
    for w in range(num_warps()):
        lowest = min(lowest, scratch[w])
    cuda.syncthreads()
    return lowest


@cuda.jit(device=True)
def advance(b, token, tokens, positions, ends, last, turns, ring):
    """Slot b after a step that chose `token`. One thread calls it."""
    turn = turns[b]
    ring[turn % ring.shape[0], b] = token
    tokens[b] = token
    positions[b] = min(positions[b] + 1, last[b])
    ends[b] = positions[b] + 1
    turns[b] = turn + 1


@cache
def make_greedy() -> Callable[..., Any]:
    """kernel(logits, tokens, positions, ends, last, turns, ring)[B, threads]."""

    @cuda.jit
    def greedy(logits, tokens, positions, ends, last, turns, ring):
        b = cuda.blockIdx.x
        best, place = -INFINITY, np.int32(NOWHERE)
        some = cuda.local.array(LOADS, types.float32)
        last_v = logits.shape[1] - 1
        for first in range(cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x * LOADS):
            for u in range(LOADS):  # all of them under way together; beyond the row its last number once more
                some[u] = logits[b, min(first + u * cuda.blockDim.x, last_v)]
            for u in range(LOADS):
                logit, v = some[u], min(first + u * cuda.blockDim.x, last_v)
                if not logit <= INFINITY:
                    logit = INFINITY  # a NaN, which would lose every comparison, must show
                if logit > best:
                    best, place = logit, np.int32(v)
        top = block_max(best)
        place = block_lowest(place if best == top else np.int32(NOWHERE))
        if cuda.threadIdx.x == 0:
            sound = -INFINITY < top and top < INFINITY
            advance(b, place if sound else np.int32(-1), tokens, positions, ends, last, turns, ring)

    return greedy


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    yield "greedy", make_greedy(), (F32_2D, *[I32_1D] * 5, I32_2D)
