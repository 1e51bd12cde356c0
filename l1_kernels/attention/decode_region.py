"""Region 2 of Deep-Fusion (paper, Fig 1c) as one launch: rotary, cache write and attention of tokens that share no row.

    q, k <- turned by their token's angle (rotary/gpu.py)
    K[row, g, end - 1], V[row, g, end - 1] <- k, v, rounded to the cache's dtype (kv_write/gpu.py)
    out[t, h] <- softmax over keys [start, end) (gpu.py)

qkv float32 [T, H+2G, d], which stays as it is; caches [B, G, S, d] in their dtype's carrier; rows, ends, index int32 [T]; cos, sin
float32 [P, r/2]; slopes float32 [H]; out [T, H*d] in float32 or the caches' carrier: all in global memory, and `work` and `arrivals`.
Bytes, with L keys a token, s bytes a number of the cache: 2*T*G*(L-1)*d*s of cache read, 2*T*G*d*s written, 4*T*(H+2G)*d of qkv
read, T*H*d*4 (or 2) written. Three launches move 8*T*(H+G)*r + 2*T*G*d*s more, with r dimensions turned: nothing. Their starts and ends
are what they cost.

    block (t, g, s) -> token t, key head g (1, 2 or 4 of its query heads), stretch s of the keys; warps, tiles and lanes as in decode.py

Nothing depends on another block's write: the block of a token's last stretch turns and rounds the new key itself, and takes it
and the value from shared memory; the first block of the key head's query heads writes them to the cache. Where two tokens shared
a row, one would read what another block has yet to write: such passes take three launches (the caller's word: CacheArgs.distinct).

A step waits for memory twice. The token's end, row and angle are asked for together; they say where its keys and cosines lie.
Then each lane asks for its first tile of keys and values, and each thread for the cosines and sines of what it brings of the queries, the
new key and value: all of it before its turn comes. These it asks for then, as one.

    keys of a token    one stretch while they are at most ONE_BLOCK bytes; otherwise as many as the grid has

Estimates, none timed: one multiprocessor draws some 80 bytes a ns (64 KB under way, 0.8 us to memory); a join by the last arrival costs
about 1.75 us (write, count, read). So a stretch of b bytes gains by n blocks where b * (1 - 1/n) / 80 > 1750: some 190 KB for n = 4.
As a block fills a multiprocessor's registers, the grid has no more blocks than there are multiprocessors where it splits at all.
Those without keys are then all there at once, and gone before the first key comes; and half of them can draw all that memory gives.
With more (token, key head)s than multiprocessors ("crowded") blocks have half the warps, so two fit: of 400 the last then
run in a second turn, not in a fourth.

The launcher (region_launch.py) gives other shapes to three launches: d > 256, d not a multiple of 8, caches that are not aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.attention.decode import JOINED, LOG2_E, LOWEST, MAX_SPLITS, PIECE, ZERO, heads_a_block, unpacker, unroll
from l1_kernels.carrier import F32_1D, F32_2D, F32_3D, FLOATS, I32_1D, array_type, rounder, storer
from l1_kernels.cuda_api import cuda, early
from l1_kernels.rotary.gpu import turned

ONE_BLOCK = 192 * 1024  # bytes of keys and values that a block takes without sharing them
exp2, lane_index, warp_index = ptx.exp2, groups.lane, groups.warp


def warps_a_block(lanes: int, heads: int, crowded: bool = False) -> int:
    """16 of 128 registers, or 12 of 168 with 4 heads; the warps' values of 4 heads of 256 dimensions fill 48 KB of shared memory
    with fewer. Half of them where two blocks share a multiprocessor."""
    most = 16 if heads < 4 else 12 if lanes < 32 else 8
    return most // 2 if crowded else most


def is_crowded(pairs: int, multiprocessors: int) -> bool:
    """`pairs`: of a token and a key head, or a chunk of its query heads; a block's work where keys are not split."""
    return pairs > multiprocessors


def keys_a_step(dtype: str, lanes: int, heads: int, crowded: bool = False) -> int:
    return warps_a_block(lanes, heads, crowded) * unroll(dtype) * (32 // lanes)


def keys_a_block(dtype: str, lanes: int) -> int:
    """ONE_BLOCK as keys."""
    return ONE_BLOCK // (2 * lanes * PIECE * (4 if dtype == "fp32" else 2))


def num_splits(pairs: int, places: int, multiprocessors: int, dtype: str, lanes: int, heads: int) -> int:
    """Stretches in the grid over a cache of `places` keys a row; 1 where it is crowded."""
    if places <= keys_a_block(dtype, lanes):
        return 1
    return max(1, min(multiprocessors // max(1, pairs), MAX_SPLITS, -(-places // keys_a_step(dtype, lanes, heads))))


def query_heads_a_block(key_heads: int, group: int, places: int, multiprocessors: int, dtype: str, lanes: int) -> int:
    """Of the `group` query heads of each of `key_heads` (of all tokens). A block that takes more of them reads their keys once; with few keys, out of L2 for the
    others, it is the chain of its work that lasts, so they are spread as far as there are multiprocessors."""
    heads = heads_a_block(group)
    while heads > 1 and places <= keys_a_block(dtype, lanes) and key_heads * -(-group // (heads // 2)) <= multiprocessors:
        heads //= 2
    return heads


def work_size(pairs: int, splits: int, heads: int, head_dim: int) -> int:
    """float32 numbers of `work`."""
    return pairs * splits * heads * (head_dim + 2) if splits > 1 else 1


@cuda.jit(device=True)
def partner(i, half, interleaved):
    """(whether dimension i is the first of its pair, the other's dimension, the pair), as in rotary/gpu.py; i < 2 * half."""
    if interleaved:
        return i & 1 == 0, i ^ 1, i >> 1
    is_first = i < half
    return is_first, (i + half if is_first else i - half), (i if is_first else i - half)


@cuda.jit(device=True)
def ceil_ratio(a, b):
    """Of positive numbers; a division of 64 bits would be a subroutine."""
    return np.int64(np.uint32(a + b - 1) // np.uint32(b))


@cache
def make_region(dtype: str, lanes: int, heads: int, out_dtype: str, crowded: bool = False) -> Callable[..., Any]:
    """kernel(qkv, group, cache_k, cache_v, rows, ends, cos, sin, index, half, interleaved, window, scale, slopes, has_slopes,
    work, arrivals, out)[(T, G * ceil(group / heads), splits), 32 * warps_a_block(lanes, heads, crowded)]

    d <= 8 * lanes; group = H / G; half 0: no rotary; work of `work_size`, and an int32 of `arrivals`, 0, for each of the grid's
    (x, y); out in `out_dtype`'s carrier."""
    unpack, load16 = unpacker(dtype), ptx.load16_stream  # no key that is read is written by this launch
    round_to_cache, store_cache, store_out = rounder(dtype), storer(dtype), storer(out_dtype)
    word = types.float32 if dtype == "fp32" else types.uint32
    num_words = PIECE if dtype == "fp32" else PIECE // 2
    keys_a_load = 32 // lanes
    log_lanes, log_keys = lanes.bit_length() - 1, keys_a_load.bit_length() - 1
    loads = unroll(dtype)
    tile = loads * keys_a_load
    warps = warps_a_block(lanes, heads, crowded)
    threads, blocks = warps * 32, 2 if crowded else 1
    step, one_block = warps * tile, keys_a_block(dtype, lanes)
    all_words, all_scores, all_values = loads * num_words, heads * loads, heads * PIECE
    dims = lanes * PIECE
    log_dims = dims.bit_length() - 1
    staged_size, new_key, new_value = (heads + 2) * dims, heads * dims, (heads + 1) * dims
    brought = -(-staged_size // threads)  # by a thread
    shared_values, shared_stats = warps * heads * dims, warps * heads
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

    @cuda.jit(device=True)
    def read8(shared, index, numbers, at):
        """8 float32 of shared memory to numbers[at: at + 8]."""
        for i in range(2):
            part = ptx.load16_shared(shared, index + 4 * i)
            for j in range(4):
                numbers[at + 4 * i + j] = part[j].view(np.float32)

    @early(alone="cache")
    @cuda.jit(launch_bounds=(threads, blocks))
    def region(
        qkv, group, cache_k, cache_v, rows, ends, cos, sin, index, half, interleaved, window, scale, slopes, has_slopes, work, arrivals, out
    ):  # fmt: skip
        staged = cuda.shared.array(staged_size, types.float32, 16)  # queries, the new key, the new value
        warp_values = cuda.shared.array(shared_values, types.float32)
        warp_best = cuda.shared.array(shared_stats, types.float32)
        warp_total = cuda.shared.array(shared_stats, types.float32)
        is_last = cuda.shared.array(1, types.int32)
        t, split, splits = cuda.blockIdx.x, cuda.blockIdx.z, cuda.gridDim.z
        end, row = ends[t], rows[t]
        angle = index[t] if half > 0 else np.int32(0)
        head_dim, num_kv_heads = cache_k.shape[3], cache_k.shape[1]
        chunks = ceil_ratio(group, heads)
        g = np.int64(np.uint32(cuda.blockIdx.y) // np.uint32(chunks))
        chunk = cuda.blockIdx.y - g * chunks
        first_head, num_mine = g * group + chunk * heads, min(heads, group - chunk * heads)
        start = max(0, end - window) if window > 0 else 0
        count = end - start
        stretch, in_use = count, 1
        if count > one_block and splits > 1:
            # The stretches are equal, but for the last, and whole steps: the number of those in use follows from the length.
            stretch = ceil_ratio(ceil_ratio(count, splits), step) * step
            in_use = ceil_ratio(count, stretch)
        if split >= in_use:
            return
        first = start + split * stretch
        has_new = split == in_use - 1
        stop = end - 1 if has_new else first + stretch  # of the keys that the cache has
        lane, warp = lane_index(), warp_index()
        place, key_of_load = lane & lanes - 1, lane >> log_lanes
        dimension = place * PIECE
        base = (row * num_kv_heads + g) * cache_k.shape[2] * head_dim + (dimension if dimension < head_dim else 0)

        k_words = cuda.local.array(all_words, word)
        v_words = cuda.local.array(all_words, word)
        query = cuda.local.array(all_values, types.float32)
        values = cuda.local.array(all_values, types.float32)
        scores = cuda.local.array(all_scores, types.float32)
        best = cuda.local.array(heads, types.float32)
        total = cuda.local.array(heads, types.float32)
        slope = cuda.local.array(heads, types.float32)
        head_of = cuda.local.array(brought, types.int64)
        own_at = cuda.local.array(brought, types.int64)
        other_at = cuda.local.array(brought, types.int64)
        own = cuda.local.array(brought, types.float32)
        others = cuda.local.array(brought, types.float32)
        cosine = cuda.local.array(brought, types.float32)
        sine = cuda.local.array(brought, types.float32)
        part_best = cuda.local.array(JOINED, types.float32)
        part_total = cuda.local.array(JOINED, types.float32)
        part = cuda.local.array(JOINED, types.float32)
        tile_key = first + warp * tile
        if tile_key < stop:
            fetch_tile(cache_k, base, tile_key + key_of_load, stop - 1, head_dim, k_words)
            fetch_tile(cache_v, base, tile_key + key_of_load, stop - 1, head_dim, v_words)
        for r in range(heads):
            slope[r] = slopes[first_head + r] * LOG2_E if has_slopes and r < num_mine else ZERO
        for u in range(brought):  # without branches: all of these are under way together
            item = cuda.threadIdx.x + u * threads
            r, i = item >> log_dims, min(item & dims - 1, head_dim - 1)
            head = first_head + min(r, num_mine - 1)
            if r >= heads:
                head = num_kv_heads * (group if r == heads else group + 1) + g
            is_first, other, angle_pair = partner(i, half, interleaved)
            turns = i < 2 * half
            head_of[u], own_at[u], other_at[u] = head, i, other if turns else i
            cosine[u], sine[u] = cos[angle, angle_pair if turns else 0], sin[angle, angle_pair if turns else 0]
            if is_first:
                sine[u] = -sine[u]
        ptx.take_turn()  # of the queries; keys and values of earlier steps are under way
        for u in range(brought):
            own[u], others[u] = qkv[t, head_of[u], own_at[u]], qkv[t, head_of[u], other_at[u]]
        for u in range(brought):
            item = cuda.threadIdx.x + u * threads
            r, i = item >> log_dims, item & dims - 1
            number = own[u]
            if i < 2 * half and r <= heads:
                number = turned(own[u], others[u], cosine[u], sine[u])
            if r >= heads and has_new and chunk == 0 and i < head_dim and item < staged_size:
                if r == heads:
                    cache_k[row, g, end - 1, i] = store_cache(number)
                else:
                    cache_v[row, g, end - 1, i] = store_cache(number)
            if item < staged_size:
                number = number * (scale * LOG2_E) if r < heads else round_to_cache(number)
                staged[item] = number if i < head_dim else ZERO
        cuda.syncthreads()

        for r in range(heads):
            best[r], total[r] = LOWEST, ZERO
            read8(staged, r * dims + dimension, query, r * PIECE)
            for i in range(PIECE):
                values[r * PIECE + i] = ZERO
        joins_new = has_new and warp == warps - 1  # the last warp is the first that has no tile
        has_keys = tile_key < stop or joins_new
        if joins_new:
            for r in range(heads):
                read8(staged, new_key + dimension, values, r * PIECE)
                product = ZERO
                for i in range(PIECE):
                    product += query[r * PIECE + i] * values[r * PIECE + i]
                for bit in range(log_lanes):
                    product += cuda.shfl_xor_sync(0xFFFFFFFF, product, 1 << bit)
                read8(staged, new_value + dimension, values, r * PIECE)
                if key_of_load == 0:
                    best[r], total[r] = product, np.float32(1)
                else:
                    for i in range(PIECE):
                        values[r * PIECE + i] = ZERO

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
            if has_keys:
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
                    warp_values[(warp * heads + r) * dims + i * lanes + place] = values[r * PIECE + i]
            if lane == 0:
                warp_best[warp * heads + r], warp_total[warp * heads + r] = best[r], total[r]
        cuda.syncthreads()

        pair = t * cuda.gridDim.y + cuda.blockIdx.y
        record = head_dim + 2
        for item in range(cuda.threadIdx.x, heads * dims, threads):
            r, i = item >> log_dims, item & dims - 1
            if r < num_mine and i < head_dim:
                block_best, block_total, value = LOWEST, ZERO, ZERO
                for w in range(warps):
                    block_best = max(block_best, warp_best[w * heads + r])
                for w in range(warps):
                    weight = exp2(warp_best[w * heads + r] - block_best)
                    block_total += warp_total[w * heads + r] * weight
                    value += warp_values[(w * heads + r) * dims + (i & 7) * lanes + (i >> 3)] * weight
                if in_use == 1:
                    out[t, (first_head + r) * head_dim + i] = store_out(value / block_total)
                else:
                    at = ((pair * splits + split) * heads + r) * record
                    work[at + i] = value
                    if i == 0:
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
        for item in range(cuda.threadIdx.x, heads * dims, threads):
            r, i = item >> log_dims, item & dims - 1
            if r < num_mine and i < head_dim:
                at = (pair * splits * heads + r) * record
                joined_best, joined_total, joined = LOWEST, ZERO, ZERO
                for first_part in range(0, in_use, JOINED):
                    better = joined_best
                    for u in range(JOINED):  # all loads of these loops are under way together
                        from_part = at + min(first_part + u, in_use - 1) * heads * record
                        part_best[u], part_total[u], part[u] = work[from_part + head_dim], work[from_part + head_dim + 1], work[from_part + i]
                    for u in range(JOINED):
                        better = max(better, part_best[u])
                    shrink = exp2(joined_best - better)
                    joined_best, joined_total, joined = better, joined_total * shrink, joined * shrink
                    for u in range(JOINED):
                        weight = exp2(part_best[u] - better) if first_part + u < in_use else ZERO
                        joined_total += weight * part_total[u]
                        joined += weight * part[u]
                out[t, (first_head + r) * head_dim + i] = store_out(joined / joined_total)

    return region


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in FLOATS:
        cache_type = array_type(dtype, 4)
        signature = (
            F32_3D, types.int64, cache_type, cache_type, I32_1D, I32_1D, F32_2D, F32_2D, I32_1D, types.int64, types.boolean,
            types.int64, types.float32, F32_1D, types.boolean, F32_1D, I32_1D,
        )  # fmt: skip
        for lanes in (8, 16, 32):
            for heads in (1, 2, 4):
                if dtype == "bf16" and (lanes, heads) not in ((8, 1), (32, 4)):
                    continue  # it differs from fp16 by one instruction a number; the least and the most registers
                # An odd number of heads of d = 72, 88, ... goes on in float32: the same kernel but for its last store.
                for out_dtype, crowded in ((dtype, False), (dtype, True), *([("fp32", False)] if dtype == "fp16" and lanes == 16 else [])):
                    name = f"decode_region_{dtype}_{PIECE * lanes}_{heads}_{out_dtype}{'_crowded' if crowded else ''}"
                    yield name, make_region(dtype, lanes, heads, out_dtype, crowded), (*signature, array_type(out_dtype, 2))
