"""Prompt attention on tensor cores ("flash attention"); the formula is gpu.py's, for many tokens, fp16 and bf16 caches.

qkv float32 [T, H+2G, d], caches [B, G, S, d], rows and ends int32 [T], slopes float32 [H], out [T, H*d] float32 or in the
carrier of the caches, rounded for a product that follows: all in global memory. 4*T*H*L*d operations for L keys a token; a block of M tokens reads its keys and values once, 2*L*d numbers
for 4*M*L*d operations (M = 64: 128 operations a byte, and most bytes from L2): bound by the tensor cores and shared memory.
Queries and probabilities are rounded to the cache's dtype, as every operand of mma is; sums are float32. No [T, L] matrix is
ever in memory.

    block (tile, h) -> 16 * WARPS tokens in a row of `rows`, query head h; warp w the tokens 16w .. 16w + 15.
    Tokens of one sequence whose keys touch make a segment. For each segment of the tile, for each tile of its keys:

        K, V [keys, d]      global -> shared memory, cp.async, one tile ahead
        S [16, keys]        = Q K^T      mma; Q stays in registers
        P                   = exp(S - best so far), masked by each token's own start and end
        O [16, d]           = O * exp(old best - best) + P V       mma; O stays in registers

Lane (g = lane / 4, t = lane % 4) of a warp. An mma's inner index may be dealt out in any order if both operands agree, so all
of shared memory is read 16 bytes a lane: of K lane (g, t) takes the dimensions 32i + 8t .. + 7 of one key, two mma's; of V the
dimensions 64j + 8g .. + 7 of the keys whose probabilities it holds, eight mma's. Column c of S stands for key c/2 of eight
(c even) or 4 + (c/2 + 2) % 4 (odd): with rows that are 32 bytes longer than a multiple of 128 no two lanes meet in a bank.

The launcher takes other shapes elsewhere: fp32, d > 256, d not a multiple of 8, caches that do not lie at a multiple of 16
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import groups, ptx
from l1_kernels.carrier import F32_1D, F32_2D, F32_3D, I32_1D, array_type
from l1_kernels.cuda_api import at_most, cuda, early

MAX_HEAD_DIM = 256
PIECE = 8  # numbers in 16 bytes
KEYS = {64: 64, 128: 32, 256: 16}  # a tile, by the padded d; two tiles of K and V fit in 48 KB of shared memory
HELD = 4  # slices of 32 dimensions of Q in registers; those of a longer head lie in shared memory
BLOCKS = 256  # a grid of fewer takes smaller blocks
LOADING_THREADS = 128
ZERO, LOWEST, NO_BITS = np.float32(0), np.float32(-3.0e38), np.uint32(0)
LOW_HALF, HIGH_HALF, HALF = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(16)
LOG2_E = np.float32(1.4426950408889634)  # scores are kept times this: 2^x takes one instruction
exp2, lane_index, warp_index, any_lane, all_lanes = ptx.exp2, groups.lane, groups.warp, groups.any_lane, groups.all_lanes


def takes(dtype: str, head_dim: int) -> bool:
    return dtype != "fp32" and head_dim <= MAX_HEAD_DIM and head_dim % PIECE == 0


def padded(head_dim: int) -> int:
    """d as the tiles hold it: a lane takes 8 of 64 dimensions of V, and indices are shifts."""
    return next(width for width in KEYS if head_dim <= width)


def most_warps(head_dim: int) -> int:
    """What registers and shared memory allow."""
    return 4 if head_dim <= 128 else 2


def warps_a_block(num_tokens: int, num_heads: int, head_dim: int) -> int:
    """Large tiles read keys less often; small ones make more blocks of a short prompt."""
    warps = most_warps(head_dim)
    while warps > 1 and -(-num_tokens // (16 * warps)) * num_heads < BLOCKS:
        warps //= 2
    return warps


def threads_a_block(warps: int) -> int:
    """A block of one warp is one of few (`warps_a_block`): three more help it to fetch, and have no tokens of their own."""
    return LOADING_THREADS if warps == 1 else 32 * warps


@cuda.jit(device=True)
def smallest(value):
    """The smallest int32 of the warp, in every lane."""
    for bit in (16, 8, 4, 2, 1):
        value = min(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, bit))
    return value


@cuda.jit(device=True)
def row_max(value):
    """The largest of the four lanes that share a row of S."""
    value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1))
    return max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 2))


@cuda.jit(device=True)
def row_sum(value):
    value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 1)
    return value + cuda.shfl_xor_sync(0xFFFFFFFF, value, 2)


@cuda.jit(device=True)
def masked(product, key, start, end, scale, slope):
    """q . k -> the score of a key for a token that sees start .. end; LOWEST outside."""
    if start <= key and key < end:
        return product * scale + slope * np.float32(key - (end - 1))
    return LOWEST


@cache
def make_prompt(dtype: str, head_dim: int, warps: int, carries: bool = False) -> Callable[..., Any]:
    """kernel(qkv, group, cache_k, cache_v, rows, ends, window, scale, slopes, has_slopes, out)
    [(ceil(T / (16 * warps)), H), threads_a_block(warps)]; group = H / G. carries: out is in the carrier of `dtype`."""
    width = padded(head_dim)
    mma, pack = (ptx.mma_f16, ptx.f32x2_to_f16x2) if dtype == "fp16" else (ptx.mma_bf16, ptx.f32x2_to_bf16x2)
    tile_tokens, tile_keys, threads = 16 * warps, KEYS[width], threads_a_block(warps)
    slices, slabs, columns, steps = -(-head_dim // 32), -(-head_dim // 64), tile_keys // 8, tile_keys // 16
    pitch = width + 16  # of a row in shared memory, in numbers
    matrix = tile_keys * pitch
    shared_size, query_size, score_size, value_size = 4 * matrix, 8 * slices, 4 * columns, 32 * slabs
    held = min(slices, HELD)
    put_by_slice = warps * 32 * 8
    put_by_size = max(4, (slices - held) * put_by_slice)
    pieces = width // PIECE  # of a key
    log_pieces = pieces.bit_length() - 1
    keys_at_once = threads // pieces
    parts = -(-tile_tokens // 32)

    @cuda.jit(device=True)
    def fetch(cache, base, key, stop, tile, at):
        """Rows key .. key + tile_keys of a head into shared memory at element `at`; zeros from `stop` on."""
        piece = (cuda.threadIdx.x & pieces - 1) * PIECE
        if piece < head_dim:
            at += piece
            base += piece
            for j in range(cuda.threadIdx.x >> log_pieces, tile_keys, keys_at_once):
                if key + j < stop:
                    ptx.copy_async16(tile, at + j * pitch, cache, base + (key + j) * head_dim)
                else:
                    ptx.store16_shared(tile, at + j * pitch, (NO_BITS, NO_BITS, NO_BITS, NO_BITS))

    @cuda.jit(device=True)
    def load_queries(qkv, t, num_tokens, h, dimension, query, at):
        """8 numbers of a token's query, as pairs, to query[at: at + 4]; zeros beyond T and d."""
        if t < num_tokens and dimension < head_dim:
            for j in range(4):
                query[at + j] = pack(qkv[t, h, dimension + 2 * j], qkv[t, h, dimension + 2 * j + 1])
        else:
            for j in range(4):
                query[at + j] = NO_BITS

    @cuda.jit(device=True)
    def put(out, t, column, values, v, factor):
        """8 numbers, every fourth of `values`, to out[t, column:]."""
        if carries:
            ptx.store16(out, t * out.shape[1] + column, (
                pack(values[v] * factor, values[v + 4] * factor), pack(values[v + 8] * factor, values[v + 12] * factor),
                pack(values[v + 16] * factor, values[v + 20] * factor), pack(values[v + 24] * factor, values[v + 28] * factor),
            ))  # fmt: skip
        else:
            for j in range(PIECE):
                out[t, column + j] = values[v + 4 * j] * factor

    @cuda.jit(device=True)
    def add_product(a, low, high, low8, high8, values, at):
        """Two mma's: dimensions 2j (the low halves of the words) and 2j + 1 of four keys each."""
        even = (low & LOW_HALF) | (high << HALF), (low8 & LOW_HALF) | (high8 << HALF)
        odd = (low >> HALF) | (high & HIGH_HALF), (low8 >> HALF) | (high8 & HIGH_HALF)
        d = mma(a, even, (values[at], values[at + 1], values[at + 2], values[at + 3]))
        values[at], values[at + 1], values[at + 2], values[at + 3] = d[0], d[1], d[2], d[3]
        d = mma(a, odd, (values[at + 4], values[at + 5], values[at + 6], values[at + 7]))
        values[at + 4], values[at + 5], values[at + 6], values[at + 7] = d[0], d[1], d[2], d[3]

    @early()
    @at_most(threads_a_block(warps))
    @cuda.jit
    def prompt(qkv, group, cache_k, cache_v, rows, ends, window, scale, slopes, has_slopes, out):
        ptx.take_turn()
        tile = cuda.shared.array(shared_size, types.uint16, 16)
        put_by = cuda.shared.array(put_by_size, types.uint32, 16)  # what of Q the registers do not hold, a lane's own
        token_start = cuda.shared.array(tile_tokens, types.int32)
        token_end = cuda.shared.array(tile_tokens, types.int32)
        opens = cuda.shared.array(tile_tokens, types.int32)  # 1: a segment begins with this token
        num_tokens = qkv.shape[0]
        first_token = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * tile_tokens  # a causal prompt's last tokens have most to do
        count = min(tile_tokens, num_tokens - first_token)
        h = cuda.blockIdx.y
        head_base = h // group * cache_k.shape[2] * head_dim
        row_size = cache_k.shape[1] * cache_k.shape[2] * head_dim
        lane, warp = lane_index(), warp_index()
        g, quarter = lane >> 2, lane & 3
        slope = slopes[h] * LOG2_E if has_slopes else ZERO
        scale *= LOG2_E

        for i in range(cuda.threadIdx.x, count, threads):
            t = first_token + i
            end = ends[t]
            start = max(0, end - window) if window > 0 else 0
            token_start[i], token_end[i] = start, end
            before_end = ends[t - 1] if i > 0 else 0
            before_start = max(0, before_end - window) if window > 0 else 0
            apart = i > 0 and (rows[t] != rows[t - 1] or start > before_end or end < before_start)
            opens[i] = 1 if i == 0 or apart else 0
        for index in range(cuda.threadIdx.x, 4 * tile_keys * pieces, threads):  # 0 * NaN is NaN
            j, piece = index >> log_pieces, (index & pieces - 1) * PIECE
            if piece >= head_dim:
                ptx.store16_shared(tile, j * pitch + piece, (NO_BITS, NO_BITS, NO_BITS, NO_BITS))

        query = cuda.local.array(query_size, types.uint32)
        scores = cuda.local.array(score_size, types.float32)
        values = cuda.local.array(value_size, types.float32)
        upper, lower = warp * 16 + g, warp * 16 + g + 8  # this lane's tokens of the tile
        put_by_at = cuda.threadIdx.x * 8
        if warp < warps:
            for i in range(slices):
                load_queries(qkv, first_token + upper, num_tokens, h, 32 * i + 8 * quarter, query, 8 * i)
                load_queries(qkv, first_token + lower, num_tokens, h, 32 * i + 8 * quarter, query, 8 * i + 4)
            for i in range(held, slices):
                q, at = 8 * i, put_by_at + (i - held) * put_by_slice
                ptx.store16_shared(put_by, at, (query[q], query[q + 4], query[q + 1], query[q + 5]))
                ptx.store16_shared(put_by, at + 4, (query[q + 2], query[q + 6], query[q + 3], query[q + 7]))
        for i in range(value_size):
            values[i] = ZERO
        upper_best, lower_best, upper_total, lower_total = LOWEST, LOWEST, ZERO, ZERO
        half_g = g >> 1
        key_of_column = half_g if g & 1 == 0 else 4 + (half_g + 2 & 3)
        key_b = 4 + (quarter + 2 & 3)  # the keys of this lane's columns of S: quarter and key_b
        k_place = key_of_column * pitch + 8 * quarter
        va_place, vb_place = matrix + quarter * pitch + 8 * g, matrix + key_b * pitch + 8 * g
        cuda.syncthreads()

        segment = 0
        while segment < count:
            next_segment = np.int32(count)
            for part in range(parts):
                i = part * 32 + lane
                if segment < i and i < count and opens[i] == 1:
                    next_segment = min(next_segment, np.int32(i))
            next_segment = smallest(next_segment)
            low, high = np.int32(0x7FFFFFFF), np.int32(0)
            for part in range(parts):
                i = part * 32 + lane
                if segment <= i and i < next_segment:
                    low, high = min(low, token_start[i]), max(high, token_end[i])
            low, high = smallest(low), -smallest(-high)
            upper_start, upper_end, lower_start, lower_end = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
            if segment <= upper and upper < next_segment:
                upper_start, upper_end = token_start[upper], token_end[upper]
            if segment <= lower and lower < next_segment:
                lower_start, lower_end = token_start[lower], token_end[lower]
            base = rows[first_token + segment] * row_size + head_base

            num_tiles = (high - low + tile_keys - 1) // tile_keys
            if num_tiles > 0:
                fetch(cache_k, base, low, high, tile, 0)
                fetch(cache_v, base, low, high, tile, matrix)
            ptx.commit_async()
            for number in range(num_tiles):
                key = low + number * tile_keys
                here, there = (number & 1) * 2 * matrix, (number + 1 & 1) * 2 * matrix
                if number + 1 < num_tiles:
                    fetch(cache_k, base, key + tile_keys, high, tile, there)
                    fetch(cache_v, base, key + tile_keys, high, tile, there + matrix)
                ptx.commit_async()
                ptx.wait_async(1)
                cuda.syncthreads()
                touched = (upper_start < key + tile_keys and key < upper_end) or (lower_start < key + tile_keys and key < lower_end)
                if any_lane(touched):
                    k_at = here + k_place
                    for i in range(score_size):
                        scores[i] = ZERO
                    for i in range(slices):
                        if i < held:
                            q = 8 * i
                            a = query[q], query[q + 4], query[q + 1], query[q + 5]
                            b = query[q + 2], query[q + 6], query[q + 3], query[q + 7]
                        else:
                            a = ptx.load16_shared(put_by, put_by_at + (i - held) * put_by_slice)
                            b = ptx.load16_shared(put_by, put_by_at + (i - held) * put_by_slice + 4)
                        for c in range(columns):
                            w = ptx.load16_shared(tile, k_at + (8 * c * pitch + 32 * i))
                            s = 4 * c
                            d = mma(a, (w[0], w[1]), (scores[s], scores[s + 1], scores[s + 2], scores[s + 3]))
                            d = mma(b, (w[2], w[3]), d)
                            scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = d[0], d[1], d[2], d[3]

                    upper_better, lower_better = upper_best, lower_best
                    last = key + tile_keys
                    upper_full, lower_full = upper_start <= key and last <= upper_end, lower_start <= key and last <= lower_end
                    if all_lanes(upper_full and lower_full and not has_slopes):
                        for s in range(score_size):
                            scores[s] *= scale
                    else:
                        for c in range(columns):
                            for b in range(2):
                                j = np.int32(key + 8 * c + (quarter if b == 0 else key_b))
                                s = 4 * c + b
                                scores[s] = masked(scores[s], j, upper_start, upper_end, scale, slope)
                                scores[s + 2] = masked(scores[s + 2], j, lower_start, lower_end, scale, slope)
                    for s in range(0, score_size, 4):
                        upper_better = max(upper_better, max(scores[s], scores[s + 1]))
                        lower_better = max(lower_better, max(scores[s + 2], scores[s + 3]))
                    upper_better, lower_better = row_max(upper_better), row_max(lower_better)
                    # A row that has seen no key yet stays at LOWEST, and 2^(LOWEST - 0) is 0. A NaN stays one.
                    upper_base = upper_better if upper_better > LOWEST else ZERO
                    lower_base = lower_better if lower_better > LOWEST else ZERO
                    upper_shrink, lower_shrink = exp2(upper_best - upper_base), exp2(lower_best - lower_base)
                    upper_best, lower_best = upper_better, lower_better
                    upper_total *= upper_shrink
                    lower_total *= lower_shrink
                    for i in range(0, value_size, 4):
                        values[i] *= upper_shrink
                        values[i + 1] *= upper_shrink
                        values[i + 2] *= lower_shrink
                        values[i + 3] *= lower_shrink
                    for s in range(0, score_size, 4):
                        for b in range(2):
                            scores[s + b] = exp2(scores[s + b] - upper_base)
                            scores[s + b + 2] = exp2(scores[s + b + 2] - lower_base)
                            upper_total += scores[s + b]
                            lower_total += scores[s + b + 2]

                    va_at, vb_at = here + va_place, here + vb_place
                    for step in range(steps):
                        s = 8 * step
                        a = (
                            pack(scores[s], scores[s + 1]), pack(scores[s + 2], scores[s + 3]),
                            pack(scores[s + 4], scores[s + 5]), pack(scores[s + 6], scores[s + 7]),
                        )  # fmt: skip
                        for slab in range(slabs):
                            w0 = ptx.load16_shared(tile, va_at + (16 * step * pitch + 64 * slab))
                            w1 = ptx.load16_shared(tile, vb_at + (16 * step * pitch + 64 * slab))
                            w2 = ptx.load16_shared(tile, va_at + ((16 * step + 8) * pitch + 64 * slab))
                            w3 = ptx.load16_shared(tile, vb_at + ((16 * step + 8) * pitch + 64 * slab))
                            add_product(a, w0[0], w1[0], w2[0], w3[0], values, 32 * slab)
                            add_product(a, w0[1], w1[1], w2[1], w3[1], values, 32 * slab + 8)
                            add_product(a, w0[2], w1[2], w2[2], w3[2], values, 32 * slab + 16)
                            add_product(a, w0[3], w1[3], w2[3], w3[3], values, 32 * slab + 24)
                cuda.syncthreads()
            segment = next_segment

        upper_total, lower_total = row_sum(upper_total), row_sum(lower_total)
        upper_factor = np.float32(1) / upper_total if upper_total != ZERO else ZERO  # no keys: zeros
        lower_factor = np.float32(1) / lower_total if lower_total != ZERO else ZERO
        for slab in range(slabs):
            for half in range(2):
                dimension = 64 * slab + 16 * quarter + 8 * half
                if dimension < head_dim:
                    v, column = 32 * slab + half, h * head_dim + dimension
                    if upper < count:
                        put(out, first_token + upper, column, values, v, upper_factor)
                    if lower < count:
                        put(out, first_token + lower, column, values, v + 2, lower_factor)

    return prompt


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in ("fp16", "bf16"):
        cache_type = array_type(dtype, 4)
        signature = (
            F32_3D, types.int64, cache_type, cache_type, I32_1D, I32_1D, types.int64, types.float32, F32_1D, types.boolean,
        )  # fmt: skip
        for head_dim in (64, 80, 128, 256) if dtype == "fp16" else (64, 256):  # they differ by the mma's name
            for warps in (1, most_warps(head_dim)):
                for carries, out in ((False, F32_2D), (True, array_type(dtype, 2))):
                    name = f"prompt_{dtype}_{head_dim}_{warps}{'_carries' if carries else ''}"
                    yield name, make_prompt(dtype, head_dim, warps, carries), (*signature, out)
