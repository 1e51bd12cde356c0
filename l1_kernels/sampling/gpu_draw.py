"""tokens[b] ~ softmax(penalised logits[b] / temperature), cut to its top k and its smallest set of mass p: as reference.py

logits float32 [B, V] in global memory (changed in place by the penalty), slots and draw as in slots.py. A row is read some
40 times, out of L2, by one block: bound by the latency of its loads, so four are in flight in each thread. (With one in
flight, top k and top p together took 0.8 ms at V = 50 400 on an H200.) Probabilities are float64, the host's to the last
bits, or now and then another token would be drawn.

    block b -> slot b; thread t looks at v = t, t + threads, ...

What is kept is never sorted: it is all v whose logit is above a threshold, and of those equal to it the first ones.

    narrow   the threshold: quarter the range of all float32 (in the order of their bits) 16 times, each time into the quarter
             where the weight above passes the limit. A weight is 1 for top k and the probability for top p; sums are made in a
             fixed order, so a run gives the same token every time
    find     the first v at which the cumulated weight passes a target, in the order of ids: a stretch of v for each warp,
             then the one stretch by scans of 32. It draws the token, and it finds the last of equals that is kept

The launcher rejects what `check` and `check_draw` reject. B = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups
from l1_kernels.carrier import F32_2D, I32_1D, I32_2D
from l1_kernels.cuda_api import at_most, cuda, math
from l1_kernels.sampling import philox
from l1_kernels.sampling.gpu import INFINITY, NOWHERE, advance, block_lowest

MAX_THREADS = 512  # 1024 would leave a thread fewer registers than it needs
LOWEST, QUARTERS = np.int64(-(1 << 31)), 16  # 4^16 = 2^32 numbers from LOWEST on hold every key
EVERYTHING = np.int64(1 << 31)
COUNT, MASS = np.int32(0), np.int32(1)  # what a weight is; no bool, of which numba makes a version for each literal
reduce_sum, inclusive_scan, ballot = groups.reduce_sum, groups.inclusive_scan, groups.ballot
block_max, lane_index, warp_index, num_warps = groups.block_max, groups.lane, groups.warp, groups.num_warps
uniform = philox.uniform


@cuda.jit(device=True)
def key_of(bits):
    """float32 bits as an integer that is ordered as the numbers are; both zeros are 0."""
    key = np.int64(bits)
    return key if key >= 0 else -(key & np.int64(0x7FFFFFFF))


@cuda.jit(device=True)
def weight(logits, bits, b, v, low, high, threshold, cut, best, temperature, kind):
    """Of token v: 0 unless it is kept so far (above the threshold, or equal to it and no later than `cut`) and its key lies in
    low..high - 1; else 1, or its probability times a common factor."""
    key = key_of(bits[b, v])
    if key < low or key >= high or key < threshold or (key == threshold and v > cut):
        return 0.0
    if kind == MASS:
        return math.exp((np.float64(logits[b, v]) - best) / temperature)
    return 1.0


@cuda.jit(device=True)
def key_at(bits, b, v):
    """The key of token v; LOWEST, which no number has, for v beyond the row. The load is made in any case, so that several are
    in flight."""
    size = bits.shape[1]
    key = key_of(bits[b, min(v, size - 1)])
    return key if v < size else LOWEST


@cuda.jit(device=True)
def quarter_of(logits, key, b, v, low, step, high, threshold, cut, best, temperature, kind):
    """(weight, quarter 1..3 of low..high - 1 that the key lies in); (0, 0) in the first quarter, outside, or not kept so far."""
    if key < low + step or key >= high or key < threshold or (key == threshold and v > cut):
        return 0.0, 0
    quarter = 1 + (1 if key >= low + 2 * step else 0) + (1 if key >= low + 3 * step else 0)
    if kind == MASS:
        return math.exp((np.float64(logits[b, v]) - best) / temperature), quarter
    return 1.0, quarter


@cuda.jit(device=True)
def block_sum(value, scratch):
    """The sum of a float64 over the block, the same bits in every thread. scratch: float64 [32], shared."""
    part = reduce_sum(value)
    if lane_index() == 0:
        scratch[warp_index()] = part
    cuda.syncthreads()
    total = scratch[0]
    for w in range(1, num_warps()):
        total += scratch[w]
    cuda.syncthreads()
    return total


@cuda.jit(device=True)
def find(logits, bits, b, low, high, threshold, cut, best, temperature, kind, share, target, sums, found):
    """The lowest v with weight(0) + .. + weight(v) > target, where target is `share` of all weight if share >= 0; if rounding
    leaves none, the last v that has a weight. sums: float64 [32], found: int32 [1], shared."""
    size, warps, lane = logits.shape[1], num_warps(), lane_index()
    stretch = (size + 32 * warps - 1) // (32 * warps) * 32
    start = warp_index() * stretch
    mine = 0.0
    for v in range(start + lane, min(start + stretch, size), 32):
        mine += weight(logits, bits, b, v, low, high, threshold, cut, best, temperature, kind)
    mine = reduce_sum(mine)
    if lane == 0:
        sums[warp_index()] = mine
    cuda.syncthreads()
    if share >= 0.0:
        total = 0.0
        for w in range(warps):
            total += sums[w]
        target = share * total
    before, chosen, last = 0.0, -1, 0
    passed = 0.0
    for w in range(warps):
        if sums[w] > 0.0:
            last = w
            if chosen < 0 and passed + sums[w] > target:
                chosen, before = w, passed
        passed += sums[w]
    if chosen < 0:
        chosen, before = last, passed - sums[last]
    if warp_index() == chosen:
        place, latest, carry = -1, 0, before
        first = start
        while place < 0 and first < min(start + stretch, size):
            v = first + lane
            x = 0.0
            if v < size:
                x = weight(logits, bits, b, v, low, high, threshold, cut, best, temperature, kind)
            reached = inclusive_scan(x) + carry
            heavy = ballot(x > 0.0)
            if heavy != 0:
                latest = first + 31 - cuda.clz(heavy)
            passing = ballot(x > 0.0 and reached > target)
            if passing != 0:
                place = first + cuda.ffs(passing) - 1
            carry = cuda.shfl_sync(0xFFFFFFFF, reached, 31)
            first += 32
        if lane == 0:
            found[0] = place if place >= 0 else latest
    cuda.syncthreads()
    result = found[0]
    cuda.syncthreads()
    return result


@cuda.jit(device=True)
def narrow(logits, bits, b, threshold, cut, best, temperature, kind, limit, sums, found):
    """-> (threshold, cut) of the fewest kept tokens, best first, whose weight reaches `limit`; of equals the lowest ids."""
    low, step, above = np.int64(LOWEST), np.int64(1) << np.int64(2 * QUARTERS), 0.0
    for _ in range(QUARTERS):
        high, step = low + step, step >> np.int64(2)
        one, two, three = 0.0, 0.0, 0.0  # the weight from low + step, 2 step, 3 step up to high
        stride = cuda.blockDim.x
        for v in range(cuda.threadIdx.x, logits.shape[1], 4 * stride):
            keys = (key_at(bits, b, v), key_at(bits, b, v + stride), key_at(bits, b, v + 2 * stride), key_at(bits, b, v + 3 * stride))
            for i in range(4):
                x, quarter = quarter_of(
                    logits, keys[i], b, v + i * stride, low, step, high, threshold, cut, best, temperature, kind
                )  # fmt: skip
                one += x
                two += x if quarter >= 2 else 0.0
                three += x if quarter == 3 else 0.0
        one, two, three = block_sum(one, sums), block_sum(two, sums), block_sum(three, sums)
        if above + three >= limit:
            low += 3 * step
        elif above + two >= limit:
            low, above = low + 2 * step, above + three
        elif above + one >= limit:
            low, above = low + step, above + two
        else:
            above += one
    # `low` is the threshold's key. Of its equals, which all weigh the same, the j-th is kept while above + j * its weight < limit.
    equals, each = 0.0, 0.0
    for v in range(cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x):
        equals += weight(logits, bits, b, v, low, low + 1, threshold, cut, best, temperature, COUNT)
        each = max(each, weight(logits, bits, b, v, low, low + 1, threshold, cut, best, temperature, kind))
    holders = block_sum(1.0 if each > 0.0 else 0.0, sums)
    equals, each = block_sum(equals, sums), block_sum(each, sums) / max(1.0, holders)
    keep = equals
    if each > 0.0:
        keep = max(1.0, min(equals, math.ceil((limit - above) / each)))
    if keep < equals:
        cut = find(logits, bits, b, low, low + 1, threshold, cut, best, temperature, COUNT, -1.0, keep - 0.5, sums, found)
    else:
        cut = cut if low == threshold else np.int32(NOWHERE)
    return low, cut


@cache
def make_sample() -> Callable[..., Any]:
    """kernel(logits, bits, temperature, top_k, top_p, penalty, seed, prompts, steps, seen, tokens, positions, ends, last, turns,
    ring)[B, threads]; `bits` is logits as int32, the same memory; the seed's 64 bits come as int64."""

    @at_most(MAX_THREADS)
    @cuda.jit
    def sample(
        logits, bits, temperature, top_k, top_p, penalty, seed, prompts, steps, seen, tokens, positions, ends, last, turns, ring
    ):  # fmt: skip
        # One scratch for all: numba would link a device function's own shared array in once a caller.
        sums, found = cuda.shared.array(32, np.float64), cuda.shared.array(1, np.int32)
        b, size = cuda.blockIdx.x, logits.shape[1]
        largest, place = -INFINITY, np.int32(NOWHERE)
        for v in range(cuda.threadIdx.x, size, cuda.blockDim.x):
            logit = logits[b, v]
            if penalty != 1.0 and seen[b, v] != 0:
                wide = np.float64(logit)
                logit = np.float32(wide / penalty if wide > 0.0 else wide * penalty)
                logits[b, v] = logit
            if not logit <= INFINITY:
                logit = INFINITY  # a NaN, which would lose every comparison, must show
            if logit > largest:
                largest, place = logit, np.int32(v)
        top = block_max(largest)
        place = block_lowest(place if largest == top else np.int32(NOWHERE))
        token = np.int32(place)
        if not (-INFINITY < top and top < INFINITY):
            token = np.int32(-1)
        elif temperature > 0.0:
            best = np.float64(top)
            threshold, cut = np.int64(LOWEST), np.int32(NOWHERE)
            if 0 < top_k and top_k < size:
                threshold, cut = narrow(logits, bits, b, threshold, cut, best, temperature, COUNT, np.float64(top_k), sums, found)
            if top_p < 1.0:
                mass = 0.0
                for v in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                    mass += weight(logits, bits, b, v, LOWEST, EVERYTHING, threshold, cut, best, temperature, MASS)
                limit = top_p * block_sum(mass, sums)
                threshold, cut = narrow(logits, bits, b, threshold, cut, best, temperature, MASS, limit, sums, found)
            number = uniform(np.uint64(seed), np.uint64(prompts[b]), np.uint64(steps[b]))
            token = np.int32(find(logits, bits, b, LOWEST, EVERYTHING, threshold, cut, best, temperature, MASS, number, 0.0, sums, found))
        if cuda.threadIdx.x == 0:
            steps[b] += 1
            if penalty != 1.0 and token >= 0:
                seen[b, token] = 1
            advance(b, token, tokens, positions, ends, last, turns, ring)

    return sample


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    numbers = (types.float64, types.int64, types.float64, types.float64, types.int64)
    seen = types.Array(types.int8, 2, "C")
    yield "sample", make_sample(), (F32_2D, I32_2D, *numbers, I32_1D, I32_1D, seen, *[I32_1D] * 5, I32_2D)
