"""Attention in the step kernel: rotary, the new key and value into the cache, and softmax over all keys; region 2.

    item (token, key head, chunk of its query heads, stretch of the keys) -> a block, all its warps
    stretches    as many as leave no block without work, but of at least LEAST keys; known by the length, on the device
    warp         tiles of keys, `lanes` lanes a key, 8 dimensions each, an online softmax a group of lanes (attention/decode.py)

Keys of earlier steps do not depend on this one: the first tile of each warp is asked for before the block waits for the
queries. The new key and value never go through memory for their own step: the block that owns the last stretch rotates
and rounds them, writes them to the cache (the chunk 0 of a head's query heads), and starts its softmax with them.
No two tokens of a step share a row of the cache.

Stretches are joined by the last block of a (token, head, chunk) to arrive, as in attention/decode.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import feed_ptx, groups, ptx
from l1_kernels.attention.decode import LOG2_E, LOWEST, unpacker
from l1_kernels.attention.decode_region import partner
from l1_kernels.carrier import rounder
from l1_kernels.cuda_api import cuda
from l1_kernels.rotary.gpu import turned
from l1_kernels.step.gemm import first_item
from l1_kernels.step.program import (
    CACHE_K,
    CACHE_ROWS,
    CACHE_V,
    COS,
    ENDS,
    FIRST,
    HALF,
    HEAD_DIM,
    HEADS,
    INTERLEAVED,
    KV_HEADS,
    OUT,
    PLACES,
    POSITIONS,
    QKV,
    ROTARY_ROW,
    SIN,
    SLOPES,
    SOFTMAX_SCALE,
    SPLITS,
    WINDOW,
)  # fmt: skip
from l1_kernels.step.together import make_together

EIGHT = 8  # dimensions of a lane
LEAST = 128  # keys of a stretch, where there are as many
ZERO = np.float32(0)
exp2, lane_index, warp_index = ptx.exp2, groups.lane, groups.warp


def loads_of(heads: int) -> int:
    """Keys that a group of lanes has under way, and as many values: registers hold no more."""
    return 2 if heads == 1 else 1


def scratch_words(lanes: int, heads: int, warps: int) -> int:
    """4-byte words of shared memory: queries, the new key and value, the warps' values, best scores and sums."""
    dims = lanes * EIGHT
    return (heads + 2) * dims + warps * heads * (dims + 2)


@cache
def make_attend(cache_dtype: str, carried: str, lanes: int, heads: int, warps: int) -> Callable[..., Any]:
    """attend(desc, row, waits, num_tokens, scratch, counter, seen, work, arrivals) -> seen. `waits`: for the operation before;
    scratch: the shared address of `scratch_words`."""
    unpack = unpacker(cache_dtype)
    to_cache, narrow_cache = rounder(cache_dtype), ptx.f32_to_bf16 if cache_dtype == "bf16" else ptx.f32_to_f16
    narrow = ptx.f32_to_bf16 if carried == "bf16" else ptx.f32_to_f16
    meet, wait = make_together(warps)
    dims = lanes * EIGHT
    keys_a_load = 32 // lanes
    log_dims = dims.bit_length() - 1
    log_lanes, log_keys = lanes.bit_length() - 1, keys_a_load.bit_length() - 1
    loads = loads_of(heads)
    tile = loads * keys_a_load
    hop = warps * tile
    threads = warps * 32
    all_words, all_scores, all_values = loads * 4, heads * loads, heads * EIGHT
    new_key, new_value = heads * dims * 4, (heads + 1) * dims * 4  # bytes
    warp_values = (heads + 2) * dims * 4
    warp_stats = warp_values + warps * heads * dims * 4
    read, write = feed_ptx.load_f32_shared_at, feed_ptx.store_f32_shared_at

    @cuda.jit(device=True, forceinline=True)
    def fetch_tile(base, key, last, head_dim, words):
        """This lane's 16 bytes of `loads` keys; beyond the last one that again: it weighs nothing."""
        for u in range(loads):
            v = feed_ptx.load16_at(base + np.int64(min(key + u * keys_a_load, last)) * head_dim * 2)
            words[u * 4], words[u * 4 + 1], words[u * 4 + 2], words[u * 4 + 3] = v[0], v[1], v[2], v[3]

    @cuda.jit(device=True)
    def rotated(desc, row, base, i, angle):
        """Dimension i of the head at `base`, turned by its token's angle."""
        half = np.int32(desc[row + HALF])
        x = feed_ptx.load_f32_at(base + i * 4)
        if i >= 2 * half:
            return x
        is_first, other, pair = partner(i, half, desc[row + INTERLEAVED] != 0)
        y = feed_ptx.load_f32_at(base + np.int32(other) * 4)
        at = np.int64(np.int32(angle * half + pair)) * 4
        c, s = feed_ptx.load_f32_at(desc[row + COS] + at), feed_ptx.load_f32_at(desc[row + SIN] + at)
        return turned(x, y, c, -s if is_first else s)

    @cuda.jit(device=True)
    def attend(desc, row, waits, num_tokens, scratch, counter, seen, work, arrivals):
        is_last = cuda.shared.array(1, types.int32)
        num_heads, num_kv_heads, head_dim = np.int32(desc[row + HEADS]), np.int32(desc[row + KV_HEADS]), np.int32(desc[row + HEAD_DIM])
        splits, window = np.int32(desc[row + SPLITS]), np.int32(desc[row + WINDOW])
        group = np.int32(num_heads // num_kv_heads)
        chunks = np.int32(np.int32(group + heads - 1) // heads)
        scale = np.int32(desc[row + SOFTMAX_SCALE]).view(np.float32) * LOG2_E
        lane, warp = np.int32(lane_index()), np.int32(warp_index())
        place, key_of_load = np.int32(lane & lanes - 1), np.int32(lane >> log_lanes)
        dimension = np.int32(place * EIGHT)
        holds = dimension < head_dim
        record = np.int32(head_dim + 2)
        k_words = cuda.local.array(all_words, types.uint32)
        v_words = cuda.local.array(all_words, types.uint32)
        query = cuda.local.array(all_values, types.float32)
        values = cuda.local.array(all_values, types.float32)
        scores = cuda.local.array(all_scores, types.float32)
        best = cuda.local.array(heads, types.float32)
        total = cuda.local.array(heads, types.float32)
        slope = cuda.local.array(heads, types.float32)

        num_items = np.int32(num_tokens * num_kv_heads * chunks * splits)
        item = first_item(desc[row + FIRST])
        while item < num_items:
            rest = np.int32(item // splits)
            split = np.int32(item - rest * splits)
            pair = rest  # (token, key head, chunk)
            rest = np.int32(pair // chunks)
            chunk = np.int32(pair - rest * chunks)
            t = np.int32(rest // num_kv_heads)
            kv_head = np.int32(rest - t * num_kv_heads)
            end = feed_ptx.load_i32_at(desc[row + ENDS] + t * 4)
            cache_row = np.int64(feed_ptx.load_i32_at(desc[row + CACHE_ROWS] + t * 4))
            start = np.int32(max(0, end - window)) if window > 0 else np.int32(0)
            count = np.int32(end - start)
            stretch = np.int32(max(LEAST, np.int32(count + splits - 1) // splits))
            in_use = np.int32(max(1, np.int32(count + stretch - 1) // stretch))
            if split < in_use:
                first = np.int32(start + split * stretch)
                owner = first + stretch >= end
                old_stop = np.int32(end - 1 if owner else first + stretch)  # keys of earlier steps
                head = (cache_row * num_kv_heads + kv_head) * desc[row + PLACES] * head_dim
                base_k = desc[row + CACHE_K] + (head + (dimension if holds else 0)) * 2
                base_v = desc[row + CACHE_V] + (head + (dimension if holds else 0)) * 2
                first_head = np.int32(kv_head * group + chunk * heads)
                num_mine = np.int32(min(heads, group - chunk * heads))
                tile_key = np.int32(first + warp * tile)
                if tile_key < old_stop:
                    fetch_tile(base_k, tile_key + key_of_load, old_stop - 1, head_dim, k_words)
                    fetch_tile(base_v, tile_key + key_of_load, old_stop - 1, head_dim, v_words)
                angle = np.int32(0)
                if desc[row + HALF] > 0:
                    angle = feed_ptx.load_i32_at(desc[row + ROTARY_ROW] + t * 4)
                position = np.int64(feed_ptx.load_i32_at(desc[row + POSITIONS] + t * 4))
                if waits:
                    seen = wait(counter, seen)
                    waits = False
                else:
                    meet()  # all have read what an item before left in shared memory

                qkv = desc[row + QKV] + np.int64(t * (num_heads + 2 * num_kv_heads)) * head_dim * 4
                at = np.int32(cuda.threadIdx.x)
                while at < (heads + 2) * dims:
                    r = np.int32(at >> log_dims)
                    i = np.int32(at & dims - 1)
                    value = ZERO
                    if i < head_dim:
                        if r < num_mine:
                            value = rotated(desc, row, qkv + np.int32(first_head + r) * head_dim * 4, i, angle) * scale
                        elif r >= heads and owner:
                            if r == heads:
                                value = to_cache(rotated(desc, row, qkv + np.int32(num_heads + kv_head) * head_dim * 4, i, angle))
                            else:
                                value = to_cache(feed_ptx.load_f32_at(qkv + np.int32((num_heads + num_kv_heads + kv_head) * head_dim + i) * 4))
                            if chunk == 0:
                                cache = desc[row + CACHE_K] if r == heads else desc[row + CACHE_V]
                                feed_ptx.store_u16_at(cache + (head + position * head_dim + i) * 2, narrow_cache(value))
                    write(np.uint32(scratch + at * 4), value)
                    at = np.int32(at + threads)
                meet()

                for r in range(heads):
                    best[r], total[r], slope[r] = LOWEST, ZERO, ZERO
                    if desc[row + SLOPES] and r < num_mine:
                        slope[r] = feed_ptx.load_f32_at(desc[row + SLOPES] + np.int64(first_head + r) * 4) * LOG2_E
                    for i in range(EIGHT):
                        query[r * EIGHT + i] = read(np.uint32(scratch + (r * dims + dimension + i) * 4))
                        values[r * EIGHT + i] = ZERO
                if owner and warp == 0:
                    for r in range(heads):
                        product = ZERO
                        for i in range(EIGHT):
                            product += query[r * EIGHT + i] * read(np.uint32(scratch + new_key + (dimension + i) * 4))
                        for bit in range(log_lanes):
                            product += cuda.shfl_xor_sync(0xFFFFFFFF, product, 1 << bit)
                        if key_of_load == 0:
                            best[r], total[r] = product, np.float32(1)
                            for i in range(EIGHT):
                                values[r * EIGHT + i] = read(np.uint32(scratch + new_value + (dimension + i) * 4))

                while tile_key < old_stop:
                    next_key = np.int32(tile_key + hop)
                    for u in range(loads):
                        key = np.int32(tile_key + u * keys_a_load + key_of_load)
                        k = unpack(k_words, u * 4)
                        for r in range(heads):
                            q = r * EIGHT
                            product = query[q] * k[0] + query[q + 1] * k[1] + query[q + 2] * k[2] + query[q + 3] * k[3]
                            product += query[q + 4] * k[4] + query[q + 5] * k[5] + query[q + 6] * k[6] + query[q + 7] * k[7]
                            for bit in range(log_lanes):
                                product += cuda.shfl_xor_sync(0xFFFFFFFF, product, 1 << bit)
                            scores[r * loads + u] = product + slope[r] * np.float32(key - (end - 1)) if key < old_stop else LOWEST
                    if next_key < old_stop:
                        fetch_tile(base_k, next_key + key_of_load, old_stop - 1, head_dim, k_words)
                    for r in range(heads):
                        better = best[r]
                        for u in range(loads):
                            better = max(better, scores[r * loads + u])
                        shrink = exp2(best[r] - better)
                        best[r] = better
                        total[r] *= shrink
                        for i in range(EIGHT):
                            values[r * EIGHT + i] *= shrink
                        for u in range(loads):
                            key = np.int32(tile_key + u * keys_a_load + key_of_load)
                            p = exp2(scores[r * loads + u] - better) if key < old_stop else ZERO
                            scores[r * loads + u] = p
                            total[r] += p
                    for u in range(loads):
                        v = unpack(v_words, u * 4)
                        for r in range(heads):
                            p = scores[r * loads + u]
                            for i in range(EIGHT):
                                values[r * EIGHT + i] += p * v[i]
                    if next_key < old_stop:
                        fetch_tile(base_v, next_key + key_of_load, old_stop - 1, head_dim, v_words)
                    tile_key = next_key

                for r in range(heads):
                    for bit in range(log_keys):
                        other = lanes << bit
                        other_best = cuda.shfl_xor_sync(0xFFFFFFFF, best[r], other)
                        better = max(best[r], other_best)
                        mine, theirs = exp2(best[r] - better), exp2(other_best - better)
                        best[r] = better
                        total[r] = total[r] * mine + cuda.shfl_xor_sync(0xFFFFFFFF, total[r], other) * theirs
                        for i in range(EIGHT):
                            value = values[r * EIGHT + i]
                            values[r * EIGHT + i] = value * mine + cuda.shfl_xor_sync(0xFFFFFFFF, value, other) * theirs
                    if key_of_load == 0:
                        for i in range(EIGHT):  # dimension 8p + i lies at i * lanes + p: no bank conflicts
                            write(np.uint32(scratch + warp_values + ((warp * heads + r) * dims + i * lanes + place) * 4), values[r * EIGHT + i])
                    if lane == 0:
                        write(np.uint32(scratch + warp_stats + (warp * heads + r) * 8), best[r])
                        write(np.uint32(scratch + warp_stats + (warp * heads + r) * 8 + 4), total[r])
                meet()

                at = np.int32(cuda.threadIdx.x)
                while at < num_mine * head_dim:
                    r = np.int32(at // head_dim)
                    i = np.int32(at - r * head_dim)
                    stats = np.int32(scratch + warp_stats + r * 8)
                    place_of_i = np.int32(scratch + warp_values + (r * dims + (i & 7) * lanes + (i >> 3)) * 4)
                    block_best, block_total, value = LOWEST, ZERO, ZERO
                    for w in range(warps):
                        block_best = max(block_best, read(np.uint32(stats + w * heads * 8)))
                    for w in range(warps):
                        weight = exp2(read(np.uint32(stats + w * heads * 8)) - block_best)
                        block_total += read(np.uint32(stats + w * heads * 8 + 4)) * weight
                        value += read(np.uint32(place_of_i + w * heads * dims * 4)) * weight
                    if in_use == 1:
                        out = np.int64(np.int32((t * num_heads + first_head + r) * head_dim + i))
                        feed_ptx.store_u16_at(desc[row + OUT] + out * 2, narrow(value / block_total))
                    else:
                        part = np.int32(((pair * splits + split) * heads + r) * record)
                        work[part + i] = value
                        if i == 0:
                            work[part + head_dim], work[part + head_dim + 1] = block_best, block_total
                    at = np.int32(at + threads)
                if in_use > 1:
                    meet()
                    if cuda.threadIdx.x == 0:
                        is_last[0] = 1 if ptx.fetch_add_release(arrivals, pair, 1) == in_use - 1 else 0
                        if is_last[0] == 1:
                            arrivals[pair] = 0
                    meet()
                    if is_last[0] == 1:
                        at = np.int32(cuda.threadIdx.x)
                        while at < num_mine * head_dim:
                            r = np.int32(at // head_dim)
                            i = np.int32(at - r * head_dim)
                            joined_best, joined_total, joined = LOWEST, ZERO, ZERO
                            for s in range(in_use):
                                part = np.int32(((pair * splits + s) * heads + r) * record)
                                part_best = work[part + head_dim]
                                better = max(joined_best, part_best)
                                mine, theirs = exp2(joined_best - better), exp2(part_best - better)
                                joined_best = better
                                joined_total = joined_total * mine + work[part + head_dim + 1] * theirs
                                joined = joined * mine + work[part + i] * theirs
                            out = np.int64(np.int32((t * num_heads + first_head + r) * head_dim + i))
                            feed_ptx.store_u16_at(desc[row + OUT] + out * 2, narrow(joined / joined_total))
                            at = np.int32(at + threads)
            item = np.int32(item + cuda.gridDim.x)
        if waits:
            seen = wait(counter, seen)
        return seen

    return attend
