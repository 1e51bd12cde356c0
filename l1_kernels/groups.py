"""Cooperative groups: the words in which kernels speak of threads that work together (paper, Section III-D).

    a tile      32 lanes, one warp: lane  warp  num_warps  sync  shfl_down  shfl_up  reduce_sum  reduce_max
                inclusive_scan  exclusive_scan  any_lane  all_lanes  ballot
    the block   block_sync  block_sum  block_max
    the grid    grid_sync

All lanes of a tile must call a tile's function together, all threads of a block a block's, and blocks are a multiple of 32
threads: the simulator refuses anything else. Values are float32 or int32 (the block's: float32).
"""

from __future__ import annotations

import numpy as np

from l1_kernels import ptx
from l1_kernels.cuda_api import cuda

TILE = 32
ALL_LANES = 0xFFFFFFFF
MAX_POLLS = 1 << 26  # some ten seconds; then the grid's barrier gives up


# A tile of 32 lanes


@cuda.jit(device=True)
def lane():
    """This thread's place in its tile, 0..31."""
    return cuda.laneid


@cuda.jit(device=True)
def warp():
    """The tile's place in its block."""
    return ((cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y) * cuda.blockDim.x + cuda.threadIdx.x) >> 5


@cuda.jit(device=True)
def num_warps():
    """Tiles in the block."""
    return (cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z) >> 5


@cuda.jit(device=True)
def sync():
    """All lanes have come, and see what the others wrote to memory."""
    cuda.syncwarp(ALL_LANES)


@cuda.jit(device=True)
def shfl_down(value, delta):
    """The value of the lane `delta` further up; lanes whose partner would be beyond 31 keep their own."""
    return cuda.shfl_down_sync(ALL_LANES, value, delta)


@cuda.jit(device=True)
def shfl_up(value, delta):
    """The value of the lane `delta` below; lanes whose partner would be below 0 keep their own."""
    return cuda.shfl_up_sync(ALL_LANES, value, delta)


@cuda.jit(device=True)
def reduce_sum(value):
    """The sum over the tile, the same in every lane: five exchanges with the lane whose number differs in one bit."""
    for bit in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(ALL_LANES, value, bit)
    return value


@cuda.jit(device=True)
def reduce_max(value):
    """The largest value of the tile, in every lane."""
    for bit in (16, 8, 4, 2, 1):
        value = max(value, cuda.shfl_xor_sync(ALL_LANES, value, bit))
    return value


@cuda.jit(device=True)
def inclusive_scan(value):
    """Lane l gets the sum over lanes 0..l."""
    for delta in (1, 2, 4, 8, 16):
        below = cuda.shfl_up_sync(ALL_LANES, value, delta)
        if cuda.laneid >= delta:
            value += below
    return value


@cuda.jit(device=True)
def exclusive_scan(value):
    """Lane l gets the sum over lanes 0..l-1, lane 0 zero. Values must be finite."""
    below = shfl_up(inclusive_scan(value), 1)
    if cuda.laneid == 0:
        below -= below
    return below


@cuda.jit(device=True)
def any_lane(predicate):
    """Does it hold in some lane?"""
    return cuda.any_sync(ALL_LANES, predicate)


@cuda.jit(device=True)
def all_lanes(predicate):
    """Does it hold in every lane?"""
    return cuda.all_sync(ALL_LANES, predicate)


@cuda.jit(device=True)
def ballot(predicate):
    """The lanes in which it holds, as a mask: bit l for lane l."""
    return cuda.ballot_sync(ALL_LANES, predicate)


# The block


@cuda.jit(device=True)
def block_sync():
    """All threads of the block have come, and see what the others wrote to shared and global memory."""
    cuda.syncthreads()


@cuda.jit(device=True)
def block_sum(value):
    """The sum of a float32 over the block, the same bits in every thread: each tile's, then those in order."""
    scratch = cuda.shared.array(TILE, np.float32)  # a block has at most 32 tiles
    part = reduce_sum(value)
    if cuda.laneid == 0:
        scratch[warp()] = part
    cuda.syncthreads()
    total = scratch[0]
    for w in range(1, num_warps()):
        total += scratch[w]
    cuda.syncthreads()  # the next call writes to scratch
    return total


@cuda.jit(device=True)
def block_max(value):
    """The largest float32 of the block, in every thread."""
    scratch = cuda.shared.array(TILE, np.float32)
    part = reduce_max(value)
    if cuda.laneid == 0:
        scratch[warp()] = part
    cuda.syncthreads()
    largest = scratch[0]
    for w in range(1, num_warps()):
        largest = max(largest, scratch[w])
    cuda.syncthreads()
    return largest


# The grid


@cuda.jit(device=True)
def grid_sync(counter):
    """All threads of the grid have come, and see what the others wrote to global memory.

    counter: int32 [1] in global memory, zero before the first launch and not touched in between; one counter serves every
    barrier of a stream's kernels. A round adds 2^31 to it, whatever the grid: each block adds 1, the first one the rest, so
    the sign turns when the last has come, and the counter wraps around cleanly.
    More blocks than fit on the GPU at once would wait for ever: after some seconds the launch fails instead.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0 and cuda.threadIdx.z == 0:
        amount = np.int32(1)
        if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and cuda.blockIdx.z == 0:
            others = cuda.gridDim.x * cuda.gridDim.y * cuda.gridDim.z - 1
            amount = np.int32(2147483647 - others) + np.int32(1)  # with no others it wraps, as it must
        before = ptx.fetch_add_release(counter, 0, amount)
        polls = 0
        while (before ^ ptx.load_acquire(counter, 0)) >= 0:
            polls += 1
            if polls > MAX_POLLS:
                ptx.trap()
    cuda.syncthreads()
