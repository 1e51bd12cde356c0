"""attention/reference.py for the CPU: the keys that tokens read are read from the cache once, scores never lie all at once.

A few tokens of a sequence (a decode step): numba. A work item is (token, key head): its H/G query heads take 32 keys at a
time with a running maximum and sum (online softmax, Milakov and Gimelshein, arXiv 1805.02867). 8*L*d bytes an item (fp32).

Many tokens of a sequence (a prompt): BLAS, key head by key head, for blocks of queries so that their scores [block, L]
stay in the L2 cache; the mask, ALiBi and softmax are one numba pass over them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import get_num_threads, njit, prange, types
from numba.extending import overload

from l1_kernels.weight import decode

PROMPT_TOKENS = 64  # of one sequence in a row; BLAS is even at 32 to 64 and takes half the time at 256
SCORES = 1 << 18  # numbers of a block of scores
BLOCK = 128  # queries of a block at most: a causal block multiplies some masked scores
SERIAL_WORK = 1 << 16  # tokens * heads * keys * d; below, one thread does it all
KEYS = 32  # keys an online-softmax step

SUMS = {"reassoc", "contract", "nsz"}  # sums may be reordered, NaN and infinity keep their meaning
_NO_SLOPES = np.empty(0, np.float32)
_LOG2_E = np.float32(1 / math.log(2))
_LN2_HIGH = np.float32(0.693359375)  # few bits: n * _LN2_HIGH is exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_TAYLOR = tuple(np.float32(1 / math.factorial(n)) for n in range(8))


def attention(
    qkv: np.ndarray,
    cache_k: np.ndarray,
    cache_v: np.ndarray,
    dtype: str,
    rows: np.ndarray,
    ends: np.ndarray,
    window: int,
    scale: float,
    slopes: np.ndarray | None,
    out: np.ndarray,
) -> None:
    """As the reference, into out [T, H, d]. Arguments are checked by the caller, the ranges of rows and ends too."""
    num_tokens = len(qkv)
    slopes = _NO_SLOPES if slopes is None else slopes
    starts = np.maximum(ends - np.int32(window), np.int32(0)) if window > 0 else np.zeros_like(ends)
    first = 0  # tokens before it are done
    for begin, end in _prompts(rows, starts, ends):
        _few(qkv, out, cache_k, cache_v, dtype, rows, starts, ends, scale, slopes, first, begin)
        keys, values = cache_k[rows[begin]], cache_v[rows[begin]]
        _prompt(qkv[begin:end], out[begin:end], keys, values, dtype, starts[begin:end], ends[begin:end], scale, slopes)
        first = end
    _few(qkv, out, cache_k, cache_v, dtype, rows, starts, ends, scale, slopes, first, num_tokens)


def _prompts(rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Runs of at least PROMPT_TOKENS tokens of one sequence whose neighbours' keys touch, so that every key between a
    run's first and last is read by one of them (what nobody wrote may be NaN, and 0 * NaN is NaN)."""
    if len(rows) < PROMPT_TOKENS:
        return []
    apart = (rows[1:] != rows[:-1]) | (starts[1:] > ends[:-1]) | (ends[1:] < starts[:-1])
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b - a >= PROMPT_TOKENS]


def _few(
    qkv: np.ndarray,
    out: np.ndarray,
    cache_k: np.ndarray,
    cache_v: np.ndarray,
    dtype: str,
    rows: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    scale: float,
    slopes: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Tokens begin..end, each by itself."""
    if begin == end:
        return
    items = (end - begin) * cache_k.shape[1]
    work = out[begin:end].size * int(ends[begin:end].max())
    parts = min(items, get_num_threads()) if work >= SERIAL_WORK else 1
    arguments = (qkv, out, cache_k, cache_v, dtype == "bf16", rows, starts, ends, np.float32(scale), slopes, begin)
    if parts == 1:
        _items(*arguments, 0, items)
    else:
        _spread_items(*arguments, items, parts)


def _prompt(
    qkv: np.ndarray,
    out: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    dtype: str,
    starts: np.ndarray,
    ends: np.ndarray,
    scale: float,
    slopes: np.ndarray,
) -> None:
    """One sequence: qkv [T, H+2G, d], out [T, H, d], keys and values [G, S, d], starts and ends [T]."""
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    low, high = int(starts.min()), int(ends.max())
    block = min(BLOCK, max(1, SCORES // (group * max(1, high - low))))
    parts = get_num_threads()
    for g in range(num_kv_heads):
        k, v = decode(keys[g, low:high], dtype), decode(values[g, low:high], dtype)
        first = 0
        heads = slice(g * group, (g + 1) * group)
        slope = slopes[heads]
        while first < num_tokens:
            last = min(num_tokens, first + block)
            begin, end = int(starts[first:last].min()), int(ends[first:last].max())
            queries = qkv[first:last, heads].reshape(-1, head_dim)  # [block * H/G, d]
            scores = queries @ k[begin - low : end - low].T
            _softmax(scores, begin, starts[first:last], ends[first:last], np.float32(scale), slope, group, parts)
            out[first:last, heads] = (scores @ v[begin - low : end - low]).reshape(last - first, group, head_dim)
            first = last


@njit(fastmath={"contract", "nsz"})
def _exp(x):
    """e^x to 1e-7 of itself for x <= 0 (below -87: e^-87), so that it vectorises; see activation/cpu.py."""
    x = np.float32(-87) if x < np.float32(-87) else x
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    e = _TAYLOR[7]
    e = e * r + _TAYLOR[6]
    e = e * r + _TAYLOR[5]
    e = e * r + _TAYLOR[4]
    e = e * r + _TAYLOR[3]
    e = e * r + _TAYLOR[2]
    e = e * r + _TAYLOR[1]
    e = e * r + _TAYLOR[0]
    return e * np.uint32((np.int32(n) + np.int32(127)) << 23).view(np.float32)


def _number(entry, is_bf16):
    """What a cache entry (float32, or the bits of fp16 or bf16) means, as float32."""
    raise NotImplementedError  # numba compiles the version below that fits the entry's type


@overload(_number)
def _number_of(entry, is_bf16):
    if isinstance(entry, types.Float):
        return lambda entry, is_bf16: entry

    def from_bits(entry, is_bf16):  # as in linear/cpu.py
        magnitude = np.uint32(np.uint32(entry & np.uint16(0x7FFF)) << 13)
        number = np.float32(magnitude.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
        special = np.uint32(0x7F800000) if magnitude >= np.uint32(0x0F800000) else np.uint32(0)
        sign = np.uint32(np.uint32(entry & np.uint16(0x8000)) << 16)
        wide = np.uint32(np.uint32(entry) << 16)
        return np.uint32(wide if is_bf16 else number | special | sign).view(np.float32)

    return from_bits


@njit(fastmath={"nnan", "nsz", "reassoc"})  # nnan: or the loop does not vectorise. A NaN still reaches the sum of exponentials
def _largest(x):
    largest = np.float32(-np.inf)
    for j in range(x.size):
        largest = max(largest, x[j])
    return largest


@njit(fastmath=SUMS)
def _step(query, keys, values, count, first_distance, scale, slope, largest, total, scores, sums):
    """Online softmax over `count` more keys: (largest, total) so far -> new; sums [d] = sum of e^(score - largest) value.
    first_distance: of the first key from the token, 0 or negative."""
    for j in range(count):
        a = np.float32(0)
        for i in range(query.size):
            a += query[i] * keys[j, i]
        scores[j] = a * scale + slope * np.float32(first_distance + j)
    new = max(largest, _largest(scores[:count]))
    if total > 0:
        shrink = _exp(largest - new)
        total *= shrink
        for i in range(query.size):
            sums[i] *= shrink
    for j in range(count):
        scores[j] = _exp(scores[j] - new)
    for j in range(count):
        total += scores[j]
        for i in range(query.size):
            sums[i] += scores[j] * values[j, i]
    return new, total


@njit(fastmath=SUMS, cache=True)
def _items(qkv, out, cache_k, cache_v, is_bf16, rows, starts, ends, scale, slopes, begin, first, last):
    """Work items first..last: item = (token - begin) * G + key head."""
    num_heads, head_dim = out.shape[1], out.shape[2]
    num_kv_heads = cache_k.shape[1]
    group = num_heads // num_kv_heads
    keys, values = np.empty((KEYS, head_dim), np.float32), np.empty((KEYS, head_dim), np.float32)
    scores = np.empty(KEYS, np.float32)
    largest, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for item in range(first, last):
        t, g = begin + item // num_kv_heads, item % num_kv_heads
        row, end = rows[t], ends[t]
        largest[:], total[:], out[t, g * group : (g + 1) * group] = -np.inf, 0, 0
        for low in range(starts[t], end, KEYS):
            count = min(KEYS, end - low)
            for j in range(count):
                for i in range(head_dim):
                    keys[j, i] = _number(cache_k[row, g, low + j, i], is_bf16)
                    values[j, i] = _number(cache_v[row, g, low + j, i], is_bf16)
            for r in range(group):
                h = g * group + r
                slope = slopes[h] if slopes.size else np.float32(0)
                largest[r], total[r] = _step(
                    qkv[t, h], keys, values, count, low - (end - 1), scale, slope, largest[r], total[r], scores, out[t, h]
                )
        for r in range(group):
            if starts[t] < end:
                for i in range(head_dim):
                    out[t, g * group + r, i] /= total[r]


@njit(parallel=True, cache=True)
def _spread_items(qkv, out, cache_k, cache_v, is_bf16, rows, starts, ends, scale, slopes, begin, items, parts):
    for p in prange(parts):
        first, last = items * p // parts, items * (p + 1) // parts
        _items(qkv, out, cache_k, cache_v, is_bf16, rows, starts, ends, scale, slopes, begin, first, last)


@njit(fastmath=SUMS, cache=True)
def _softmax_rows(scores, begin, starts, ends, scale, slopes, group, first, last):
    for row in range(first, last):
        start, end = starts[row // group] - begin, ends[row // group] - begin
        scores[row, : max(start, 0)], scores[row, max(start, end) :] = 0, 0
        if start == end:
            continue
        p = scores[row, start:end]  # indices from 0 on: a range that could be negative does not vectorise
        if slopes.size:
            slope = slopes[row % group]
            for j in range(p.size):
                p[j] = p[j] * scale + slope * np.float32(j - (p.size - 1))
        else:
            for j in range(p.size):
                p[j] *= scale
        largest = _largest(p)
        total = np.float32(0)
        for j in range(p.size):
            p[j] = _exp(p[j] - largest)
        for j in range(p.size):
            total += p[j]
        factor = np.float32(1) / total
        for j in range(p.size):
            p[j] *= factor


@njit(parallel=True, cache=True)
def _softmax(scores, begin, starts, ends, scale, slopes, group, parts):
    """In place: scores [tokens * group, keys from `begin` on] -> probabilities, 0 outside each token's own keys."""
    rows = scores.shape[0]
    for p in prange(parts):
        _softmax_rows(scores, begin, starts, ends, scale, slopes, group, rows * p // parts, rows * (p + 1) // parts)
