"""Decode attention, split over the sequence ("flash-decoding"); the formula is gpu.py's, for few tokens of any positions.

qkv float32 [T, H+2G, d], caches [B, G, S, d] in their dtype's carrier, rows and ends int32 [T], slopes float32 [H], out
float32 [T, H*d]: all in global memory, and `work` and `arrivals` too, which hold what blocks tell each other.
With L keys a token: 4*T*H*L*d operations, 2*T*G*L*d numbers of cache, each read from memory once (a group of more than 4 query
heads reads them again from L2): H/G operations a byte in 16 bits, so bound by bytes. gpu.py does the same with 2-byte loads,
H/G times over, and in T*H blocks, too few for a GPU.

    block (t, g, s) -> token t, key head g (up to 4 of its query heads), stretch s of the keys

        keys of token t    [ stretch 0 | stretch 1 | stretch 2 | ... ]   of equal length, whole steps
        a step             [ warp 0    | warp 1    | warp 2    | ... ]   4 or 8 warps
        a warp's tile      [ key key | key key | key key | key key ]     `unroll` loads, 32 / `lanes` keys each
        a key              `lanes` lanes, 8 dimensions each (16 bytes, or twice 16 of fp32)

Each group of `lanes` lanes keeps an online softmax (best score, sum, weighted values) of its own for each query head. They are
joined by shuffles, then over warps in shared memory, then over stretches: a block writes its part to `work` and counts itself
in `arrivals`; the last of a token and key head joins the parts and sets the count back to 0 for the next launch.
Lengths are known on the device only (a CUDA graph replays while they grow): the grid is sized by the cache's S, stretches by
the length, and blocks without keys return at once; nobody waits for them.

The launcher takes other shapes to gpu.py: d > 256, d not a multiple of 8, arrays that do not lie at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, F32_3D, FLOATS, I32_1D, array_type
from l1_kernels.cuda_api import cuda

MAX_HEAD_DIM = 256
PIECE = 8  # dimensions a lane holds
MAX_SPLITS = 128
BLOCKS = 512  # at most, of a grid that is split
JOINED = 8  # parts that a thread of the last block has under way at a time
ZERO, LOWEST = np.float32(0), np.float32(-3.0e38)  # LOWEST is finite, so that LOWEST - LOWEST is 0
LOG2_E = np.float32(1.4426950408889634)  # scores are kept times this: 2^x takes one instruction
exp2, lane_index, warp_index = ptx.exp2, groups.lane, groups.warp


def takes(head_dim: int) -> bool:
    return head_dim <= MAX_HEAD_DIM and head_dim % PIECE == 0


def lanes_a_key(head_dim: int) -> int:
    """The smallest compiled variant that holds a key."""
    return next(lanes for lanes in (8, 16, 32) if head_dim <= PIECE * lanes)


def heads_a_block(group: int) -> int:
    """Of the `group` query heads of a key head; registers hold no more than 4. Of a larger group several blocks read the same
    keys at the same time, one of them from memory, the others from L2."""
    return next((heads for heads in (1, 2) if group <= heads), 4)


def warps_a_block(heads: int) -> int:
    return 8 if heads == 1 else 4


def blocks_a_multiprocessor(heads: int) -> int:
    """What the compiler fits the registers to: 12 warps of 168, or 16 of 128."""
    return 2 if heads == 1 else 3


def unroll(dtype: str) -> int:
    """Loads of keys that a lane has under way, and as many of values."""
    return 2 if dtype == "fp32" else 4


def split_bits(pairs: int, places: int, step: int) -> int:
    """log2 of the number of stretches for `pairs` blocks (token, head) and a cache of `places` keys a row, of which a block
    takes `step` at a time: as many as BLOCKS, MAX_SPLITS and the cache allow."""
    bits = 0
    while 2 << bits <= MAX_SPLITS and pairs * (2 << bits) <= BLOCKS and step << bits < places:
        bits += 1
    return bits


def keys_a_step(dtype: str, lanes: int, heads: int) -> int:
    return warps_a_block(heads) * unroll(dtype) * (32 // lanes)


def work_size(pairs: int, bits: int, heads: int, head_dim: int) -> int:
    """float32 numbers of `work`."""
    return (pairs * heads * (head_dim + 2)) << bits if bits else 1


@cache
def unpacker(dtype: str) -> Callable[..., Any]:
    """(words, at) -> the 8 numbers in uint32 words[at:at + 4], fp32: [at:at + 8]."""
    if dtype == "fp32":
        return cuda.jit(device=True)(_eight_words)
    pair = ptx.f16x2_to_f32x2 if dtype == "fp16" else ptx.bf16x2_to_f32x2

    @cuda.jit(device=True)
    def four_pairs(words, at):
        a, b = pair(words[at]), pair(words[at + 1])
        c, d = pair(words[at + 2]), pair(words[at + 3])
        return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]

    return four_pairs


def _eight_words(words, at):
    return words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4], words[at + 5], words[at + 6], words[at + 7]


@cache
def make_decode(dtype: str, lanes: int, heads: int) -> Callable[..., Any]:
    """kernel(qkv, group, cache_k, cache_v, rows, ends, window, scale, slopes, has_slopes, bits, work, arrivals, out)
    [(T, G * ceil(group / heads), 1 << bits), 32 * warps_a_block(heads)]; d <= 8 * lanes, group = H / G, work of `work_size`, and an int32
    of `arrivals`, 0, for each of the grid's (x, y)."""
    unpack, load16 = unpacker(dtype), ptx.load16_stream
    word = types.float32 if dtype == "fp32" else types.uint32
    num_words = PIECE if dtype == "fp32" else PIECE // 2
    keys_a_load = 32 // lanes
    log_lanes, log_keys = lanes.bit_length() - 1, keys_a_load.bit_length() - 1
    loads = unroll(dtype)
    tile = loads * keys_a_load
    warps = warps_a_block(heads)
    threads = warps * 32
    bounds = (threads, blocks_a_multiprocessor(heads))
    step = warps * tile
    all_words, all_scores, all_values = loads * num_words, heads * loads, heads * PIECE
    pitch = lanes * PIECE
    shared_values, shared_stats = warps * heads * pitch, warps * heads
    wide = dtype == "fp32"

    @cuda.jit(device=True)
    def fetch(array, index, words, at):
        """8 numbers at array[index]: one load of 16 bytes, or two."""
        if wide:
            for i in range(2):
                part = load16(array, index + 4 * i)
                for j in range(4):
                    words[at + 4 * i + j] = part[j].view(np.float32)
        else:
            part = load16(array, index)
            words[at], words[at + 1], words[at + 2], words[at + 3] = part[0], part[1], part[2], part[3]

    @cuda.jit(device=True)
    def fetch_tile(cache, base, key, last, head_dim, words):
        """This lane's part of a tile whose first key for it is `key`; beyond the stretch its last key once more: it weighs nothing."""
        for u in range(loads):
            fetch(cache, base + min(key + u * keys_a_load, last) * head_dim, words, u * num_words)

    @cuda.jit(launch_bounds=bounds)
    def decode(qkv, group, cache_k, cache_v, rows, ends, window, scale, slopes, has_slopes, bits, work, arrivals, out):
        warp_values = cuda.shared.array(shared_values, types.float32)
        warp_best = cuda.shared.array(shared_stats, types.float32)
        warp_total = cuda.shared.array(shared_stats, types.float32)
        is_last = cuda.shared.array(1, types.int32)
        t, split = cuda.blockIdx.x, cuda.blockIdx.z
        end, row = ends[t], rows[t]
        start = max(0, end - window) if window > 0 else 0
        count = end - start
        # The stretches are equal, but for the last, and whole steps: the number of those in use follows from the length.
        stretch = max(step, ((count + (1 << bits) - 1 >> bits) + step - 1) & -step)
        first = start + split * stretch
        if first >= end and split > 0:
            return
        stop = min(end, first + stretch)
        head_dim, num_kv_heads = cache_k.shape[3], cache_k.shape[1]
        chunks = (group + heads - 1) // heads
        g = cuda.blockIdx.y if chunks == 1 else cuda.blockIdx.y // chunks
        chunk = 0 if chunks == 1 else cuda.blockIdx.y - g * chunks
        first_head, num_mine = g * group + chunk * heads, min(heads, group - chunk * heads)
        lane, warp = lane_index(), warp_index()
        place, key_of_load = lane & lanes - 1, lane >> log_lanes
        dimension = place * PIECE
        holds = dimension < head_dim
        base = (row * num_kv_heads + g) * cache_k.shape[2] * head_dim + (dimension if holds else 0)

        k_words = cuda.local.array(all_words, word)
        v_words = cuda.local.array(all_words, word)
        query = cuda.local.array(all_values, types.float32)
        values = cuda.local.array(all_values, types.float32)
        scores = cuda.local.array(all_scores, types.float32)
        best = cuda.local.array(heads, types.float32)
        total = cuda.local.array(heads, types.float32)
        slope = cuda.local.array(heads, types.float32)
        part_best = cuda.local.array(JOINED, types.float32)
        part_total = cuda.local.array(JOINED, types.float32)
        part = cuda.local.array(JOINED, types.float32)
        for r in range(heads):
            best[r], total[r] = LOWEST, ZERO
            slope[r] = slopes[first_head + r] * LOG2_E if has_slopes and r < num_mine else ZERO
            for i in range(PIECE):
                query[r * PIECE + i], values[r * PIECE + i] = ZERO, ZERO
        tile_key = first + warp * tile
        if tile_key < stop:
            fetch_tile(cache_k, base, tile_key + key_of_load, stop - 1, head_dim, k_words)
            fetch_tile(cache_v, base, tile_key + key_of_load, stop - 1, head_dim, v_words)
        scale *= LOG2_E
        for r in range(heads):
            if holds and r < num_mine:
                at = (t * qkv.shape[1] + first_head + r) * head_dim + dimension
                low, high = ptx.load16_floats(qkv, at), ptx.load16_floats(qkv, at + 4)
                for i in range(4):
                    query[r * PIECE + i], query[r * PIECE + 4 + i] = low[i] * scale, high[i] * scale

        # The next tile's keys are under way while this one's values are weighed, and its values while keys are multiplied.
        while tile_key < stop:
            next_tile = tile_key + step
            for u in range(loads):
                key = tile_key + u * keys_a_load + key_of_load
                k = unpack(k_words, u * num_words)
                for r in range(heads):
                    q = r * PIECE
                    product = query[q] * k[0] + query[q + 1] * k[1] + query[q + 2] * k[2] + query[q + 3] * k[3]
                    product += query[q + 4] * k[4] + query[q + 5] * k[5] + query[q + 6] * k[6] + query[q + 7] * k[7]
                    for bit in range(log_lanes):
                        product += cuda.shfl_xor_sync(0xFFFFFFFF, product, 1 << bit)
                    scores[r * loads + u] = product + slope[r] * np.float32(key - (end - 1)) if key < stop else LOWEST
            if next_tile < stop:
                fetch_tile(cache_k, base, next_tile + key_of_load, stop - 1, head_dim, k_words)
            for r in range(heads):
                better = best[r]
                for u in range(loads):
                    better = max(better, scores[r * loads + u])
                shrink = exp2(best[r] - better)
                best[r] = better
                total[r] *= shrink
                for i in range(PIECE):
                    values[r * PIECE + i] *= shrink
                for u in range(loads):
                    key = tile_key + u * keys_a_load + key_of_load
                    p = exp2(scores[r * loads + u] - better) if key < stop else ZERO
                    scores[r * loads + u] = p
                    total[r] += p
            for u in range(loads):
                v = unpack(v_words, u * num_words)
                for r in range(heads):
                    p = scores[r * loads + u]
                    for i in range(PIECE):
                        values[r * PIECE + i] += p * v[i]
            if next_tile < stop:
                fetch_tile(cache_v, base, next_tile + key_of_load, stop - 1, head_dim, v_words)
            tile_key = next_tile

        for r in range(heads):
            for bit in range(log_keys):
                other = lanes << bit
                other_best = cuda.shfl_xor_sync(0xFFFFFFFF, best[r], other)
                better = max(best[r], other_best)
                mine, theirs = exp2(best[r] - better), exp2(other_best - better)
                best[r] = better
                total[r] = total[r] * mine + cuda.shfl_xor_sync(0xFFFFFFFF, total[r], other) * theirs
                for i in range(PIECE):
                    value = values[r * PIECE + i]
                    values[r * PIECE + i] = value * mine + cuda.shfl_xor_sync(0xFFFFFFFF, value, other) * theirs
            if key_of_load == 0:
                for i in range(PIECE):  # dimension 8p + i lies at i * lanes + p: no bank conflicts
                    warp_values[(warp * heads + r) * pitch + i * lanes + place] = values[r * PIECE + i]
            if lane == 0:
                warp_best[warp * heads + r], warp_total[warp * heads + r] = best[r], total[r]
        cuda.syncthreads()

        in_use = max(1, np.int64(np.uint32(count + stretch - 1) // np.uint32(stretch)))  # of 64 bits it would be a subroutine
        pair = t * cuda.gridDim.y + cuda.blockIdx.y
        record = head_dim + 2
        for r in range(num_mine):
            block_best, block_total = LOWEST, ZERO
            for w in range(warps):
                block_best = max(block_best, warp_best[w * heads + r])
            for w in range(warps):
                block_total += warp_total[w * heads + r] * exp2(warp_best[w * heads + r] - block_best)
            at = (((pair << bits) + split) * heads + r) * record
            for i in range(cuda.threadIdx.x, head_dim, threads):
                value = ZERO
                for w in range(warps):
                    value += warp_values[(w * heads + r) * pitch + (i & 7) * lanes + (i >> 3)] * exp2(warp_best[w * heads + r] - block_best)
                if in_use == 1:
                    out[t, (first_head + r) * head_dim + i] = value / block_total if count > 0 else ZERO
                else:
                    work[at + i] = value
            if in_use > 1 and cuda.threadIdx.x == 0:
                work[at + head_dim], work[at + head_dim + 1] = block_best, block_total
        if in_use == 1:
            return

        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            is_last[0] = 1 if ptx.fetch_add_release(arrivals, pair, 1) == in_use - 1 else 0
            if is_last[0] == 1:
                arrivals[pair] = 0
        cuda.syncthreads()
        if is_last[0] == 0:
            return
        for r in range(num_mine):
            at = ((pair << bits) * heads + r) * record
            for i in range(cuda.threadIdx.x, head_dim, threads):
                joined_best, joined_total, joined = LOWEST, ZERO, ZERO
                for first_part in range(0, in_use, JOINED):
                    better = joined_best
                    for u in range(JOINED):  # all loads of these loops are under way together
                        place = at + min(first_part + u, in_use - 1) * heads * record
                        part_best[u], part_total[u], part[u] = work[place + head_dim], work[place + head_dim + 1], work[place + i]
                    for u in range(JOINED):
                        better = max(better, part_best[u])
                    shrink = exp2(joined_best - better)
                    joined_best, joined_total, joined = better, joined_total * shrink, joined * shrink
                    for u in range(JOINED):
                        weight = exp2(part_best[u] - better) if first_part + u < in_use else ZERO
                        joined_total += weight * part_total[u]
                        joined += weight * part[u]
                out[t, (first_head + r) * head_dim + i] = joined / joined_total

    return decode


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in FLOATS:
        cache_type = array_type(dtype, 4)
        signature = (
            F32_3D, types.int64, cache_type, cache_type, I32_1D, I32_1D, types.int64, types.float32, F32_1D, types.boolean,
            types.int64, F32_1D, I32_1D, F32_2D,
        )  # fmt: skip
        for lanes in (8, 16, 32):
            for heads in (1, 2, 4):
                if dtype == "bf16" and (lanes, heads) not in ((8, 1), (32, 4)):
                    continue  # it differs from fp16 by one instruction a number; the least and the most registers
                yield f"decode_{dtype}_{PIECE * lanes}_{heads}", make_decode(dtype, lanes, heads), signature
