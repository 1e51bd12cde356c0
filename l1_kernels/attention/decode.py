"""Decode attention, split over the sequence ("flash-decoding"); the formula is gpu.py's, for few tokens of any positions.

qkv float32 [T, H+2G, d], caches [B, G, S, d] in their dtype's carrier, rows and ends int32 [T], slopes float32 [H], out
float32 [T, H*d]: all in global memory, and `work` and `arrivals` too, which hold what blocks tell each other.
With L keys a token: 4*T*H*L*d operations, 2*T*G*L*d numbers of cache, each read once: H/G operations a byte in 16 bits, so
bound by bytes. What gpu.py does besides: it reads them H/G times, 2 bytes a lane, by T*H blocks, too few for a GPU.

    block (t, g, s) -> token t, key head g (HEADS of its query heads at a time), stretch s of the keys

        keys of token t    [ stretch 0 | stretch 1 | stretch 2 | ... ]   of equal length, whole steps
        a step             [ warp 0    | warp 1    | warp 2    | warp 3 ]
        a warp's tile      [ key key | key key | key key | key key ]     UNROLL loads, 32 / LANES keys each
        a key              LANES lanes, 8 dimensions each (16 bytes, or twice 16 of fp32)

Each group of LANES lanes keeps an online softmax (best score, sum, weighted values) of its own for each query head. They are
joined by shuffles, then over warps in shared memory, then over stretches: a block writes its part to `work` and counts itself
in `arrivals`; the last of a token and key head joins the parts and sets the count back to 0 for the next launch.
Lengths are known on the device only (a CUDA graph replays while they grow): the grid is sized by the cache's S, stretches by
the length, and blocks without keys return at once; nobody waits for them.

The launcher takes other shapes to gpu.py: d > 256, d not a multiple of 8, caches that do not lie at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, F32_3D, FLOATS, I32_1D, array_type
from l1_kernels.cuda_api import cuda, math

MAX_HEAD_DIM = 256
WARPS = 4  # a block
PIECE = 8  # dimensions a lane holds
MAX_SPLITS = 128
BLOCKS = 1024  # at most, of a grid that is split: several times what 132 multiprocessors hold evens out their ends
ZERO, LOWEST = np.float32(0), np.float32(-3.0e38)  # LOWEST is finite, so that LOWEST - LOWEST is 0
reduce_sum, reduce_max, lane_index, warp_index = groups.reduce_sum, groups.reduce_max, groups.lane, groups.warp


def takes(head_dim: int) -> bool:
    return head_dim <= MAX_HEAD_DIM and head_dim % PIECE == 0


def lanes_a_key(head_dim: int) -> int:
    """The smallest compiled variant that holds a key."""
    return next(lanes for lanes in (8, 16, 32) if head_dim <= PIECE * lanes)


def heads_a_block(group: int) -> int:
    """Of the `group` query heads of a key head; registers hold no more than 8."""
    return next((heads for heads in (1, 4) if group <= heads), 8)


def unroll(dtype: str, heads: int) -> int:
    """Loads of keys that a lane has under way, and as many of values."""
    return 2 if dtype == "fp32" or heads == 8 else 4


def split_bits(pairs: int, places: int, step: int) -> int:
    """log2 of the number of stretches for `pairs` blocks (token, head) and a cache of `places` keys a row, of which a block
    takes `step` at a time: as many as BLOCKS, MAX_SPLITS and the cache allow."""
    bits = 0
    while 2 << bits <= MAX_SPLITS and pairs * (2 << bits) <= BLOCKS and step << bits < places:
        bits += 1
    return bits


def keys_a_step(dtype: str, lanes: int, heads: int) -> int:
    return WARPS * unroll(dtype, heads) * (32 // lanes)


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
    [(T, G * ceil(group / heads), 1 << bits), WARPS * 32]; d <= 8 * lanes, group = H / G, work of `work_size`, and an int32
    of `arrivals`, 0, for each of the grid's (x, y)."""
    unpack, load16 = unpacker(dtype), ptx.load16_stream
    word = types.float32 if dtype == "fp32" else types.uint32
    num_words = PIECE if dtype == "fp32" else PIECE // 2
    keys_a_load = 32 // lanes
    log_lanes, log_keys = lanes.bit_length() - 1, keys_a_load.bit_length() - 1
    loads = unroll(dtype, heads)
    tile = loads * keys_a_load
    step = WARPS * tile
    all_words, all_scores, all_values = loads * num_words, heads * loads, heads * PIECE
    pitch = lanes * PIECE
    shared_values, shared_stats, shared_weights = WARPS * heads * pitch, WARPS * heads, heads * MAX_SPLITS
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

    @cuda.jit
    def decode(qkv, group, cache_k, cache_v, rows, ends, window, scale, slopes, has_slopes, bits, work, arrivals, out):
        warp_values = cuda.shared.array(shared_values, types.float32)
        warp_best = cuda.shared.array(shared_stats, types.float32)
        warp_total = cuda.shared.array(shared_stats, types.float32)
        weights = cuda.shared.array(shared_weights, types.float32)
        is_last = cuda.shared.array(1, types.int32)
        t, split = cuda.blockIdx.x, cuda.blockIdx.z
        end = ends[t]
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
        base = (rows[t] * num_kv_heads + g) * cache_k.shape[2] * head_dim + (dimension if holds else 0)

        k_words = cuda.local.array(all_words, word)
        v_words = cuda.local.array(all_words, word)
        query = cuda.local.array(all_values, types.float32)
        values = cuda.local.array(all_values, types.float32)
        scores = cuda.local.array(all_scores, types.float32)
        best = cuda.local.array(heads, types.float32)
        total = cuda.local.array(heads, types.float32)
        slope = cuda.local.array(heads, types.float32)
        for r in range(heads):
            best[r], total[r] = LOWEST, ZERO
            slope[r] = slopes[first_head + r] if has_slopes and r < num_mine else ZERO
            for i in range(PIECE):
                query[r * PIECE + i] = qkv[t, first_head + r, dimension + i] * scale if holds and r < num_mine else ZERO
                values[r * PIECE + i] = ZERO

        for tile_key in range(first + warp * tile, stop, step):
            for u in range(loads):  # beyond the stretch: its last key once more, which weighs nothing
                key = min(tile_key + u * keys_a_load + key_of_load, stop - 1)
                fetch(cache_k, base + key * head_dim, k_words, u * num_words)
            for u in range(loads):
                key = min(tile_key + u * keys_a_load + key_of_load, stop - 1)
                fetch(cache_v, base + key * head_dim, v_words, u * num_words)
            for u in range(loads):
                key = tile_key + u * keys_a_load + key_of_load
                k = unpack(k_words, u * num_words)
                for r in range(heads):
                    q = r * PIECE
                    part = query[q] * k[0] + query[q + 1] * k[1] + query[q + 2] * k[2] + query[q + 3] * k[3]
                    part += query[q + 4] * k[4] + query[q + 5] * k[5] + query[q + 6] * k[6] + query[q + 7] * k[7]
                    for bit in range(log_lanes):
                        part += cuda.shfl_xor_sync(0xFFFFFFFF, part, 1 << bit)
                    scores[r * loads + u] = part + slope[r] * np.float32(key - (end - 1)) if key < stop else LOWEST
            for r in range(heads):
                better = best[r]
                for u in range(loads):
                    better = max(better, scores[r * loads + u])
                shrink = math.exp(best[r] - better)
                best[r] = better
                total[r] *= shrink
                for i in range(PIECE):
                    values[r * PIECE + i] *= shrink
                for u in range(loads):
                    key = tile_key + u * keys_a_load + key_of_load
                    p = math.exp(scores[r * loads + u] - better) if key < stop else ZERO
                    scores[r * loads + u] = p
                    total[r] += p
            for u in range(loads):
                v = unpack(v_words, u * num_words)
                for r in range(heads):
                    p = scores[r * loads + u]
                    for i in range(PIECE):
                        values[r * PIECE + i] += p * v[i]

        for r in range(heads):
            for bit in range(log_keys):
                other = lanes << bit
                other_best = cuda.shfl_xor_sync(0xFFFFFFFF, best[r], other)
                better = max(best[r], other_best)
                mine, theirs = math.exp(best[r] - better), math.exp(other_best - better)
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

        in_use = max(1, (count + stretch - 1) // stretch)
        pair = t * cuda.gridDim.y + cuda.blockIdx.y
        record = head_dim + 2
        for r in range(num_mine):
            block_best, block_total = LOWEST, ZERO
            for w in range(WARPS):
                block_best = max(block_best, warp_best[w * heads + r])
            for w in range(WARPS):
                block_total += warp_total[w * heads + r] * math.exp(warp_best[w * heads + r] - block_best)
            at = (((pair << bits) + split) * heads + r) * record
            for i in range(cuda.threadIdx.x, head_dim, WARPS * 32):
                value = ZERO
                for w in range(WARPS):
                    value += warp_values[(w * heads + r) * pitch + (i & 7) * lanes + (i >> 3)] * math.exp(warp_best[w * heads + r] - block_best)
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
        for r in range(warp, num_mine, WARPS):
            at = ((pair << bits) * heads + r) * record + head_dim
            block_best, block_total = LOWEST, ZERO
            for s in range(lane, in_use, 32):
                block_best = max(block_best, work[at + s * heads * record])
            block_best = reduce_max(block_best)
            for s in range(lane, in_use, 32):
                weight = math.exp(work[at + s * heads * record] - block_best)
                weights[r * MAX_SPLITS + s] = weight
                block_total += weight * work[at + s * heads * record + 1]
            block_total = reduce_sum(block_total)
            for s in range(lane, in_use, 32):
                weights[r * MAX_SPLITS + s] /= block_total
        cuda.syncthreads()
        for r in range(num_mine):
            at = ((pair << bits) * heads + r) * record
            for i in range(cuda.threadIdx.x, head_dim, WARPS * 32):
                value = ZERO
                for s in range(in_use):
                    value += weights[r * MAX_SPLITS + s] * work[at + s * heads * record + i]
                out[t, (first_head + r) * head_dim + i] = value

    return decode


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in FLOATS:
        cache_type = array_type(dtype, 4)
        signature = (
            F32_3D, types.int64, cache_type, cache_type, I32_1D, I32_1D, types.int64, types.float32, F32_1D, types.boolean,
            types.int64, F32_1D, I32_1D, F32_2D,
        )  # fmt: skip
        for lanes in (8, 16, 32):
            for heads in (1, 4, 8):
                yield f"decode_{dtype}_{PIECE * lanes}_{heads}", make_decode(dtype, lanes, heads), signature
