"""Host side of decode_region.py: what it takes, its checks, its launch."""

from __future__ import annotations

import numpy as np

from l1_kernels import checks
from l1_kernels.attention import decode_region
from l1_kernels.attention.decode import lanes_a_key, takes
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.regions import CacheArgs, RotaryArgs
from l1_kernels.weight import CARRIER, Array

MAX_PAIRS = 65535  # of a token: the grid's y


def takes_step(cache: CacheArgs) -> bool:
    """Whether one launch may do it: no token needs another's key, and keys can be read 16 bytes at a time."""
    return cache.distinct and takes(cache.k.shape[-1]) and checks.is_aligned(cache.k) and checks.is_aligned(cache.v)


def check(qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs, window: int, slopes: Array | None) -> None:
    """Raises ValueError with the argument's name. Rows and ends are the caller's to keep inside the cache."""
    checks.cache(qkv, num_heads, cache.k, cache.v, cache.dtype)
    num_tokens = qkv.shape[0]
    for name in ("rows", "positions", "ends"):
        checks.array(getattr(cache, name), name, INT32, (num_tokens,))
    if rotary is not None:
        checks.ranked(rotary.cos, "cos", FLOAT32, 2)
        checks.array(rotary.sin, "sin", FLOAT32, rotary.cos.shape)
        checks.array(rotary.index, "index", INT32, (num_tokens,))
        if 2 * rotary.cos.shape[1] > qkv.shape[2]:
            checks.reject("cos", f"[P, r/2] with r <= {qkv.shape[2]} (qkv's d)", checks.describe(rotary.cos))
    if slopes is not None:
        checks.array(slopes, "slopes", FLOAT32, (num_heads,))
    if window < 0:
        checks.reject("window", "0 (the whole context) or positive", window)


def attend_step(
    kernels: GpuKernels, multiprocessors: int, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs,
    window: int, scale: float, slopes: Array | None,
) -> Array:  # fmt: skip
    """qkv float32 [T, H+2G, d], not changed -> mixed [T, H * d]: in the carrier of the cache's dtype where a GeMM can read it 16 bytes
    at a time, otherwise float32. Of tokens that share no row, with ends = positions + 1."""
    check(qkv, num_heads, rotary, cache, window, slopes)
    num_tokens, _, head_dim = qkv.shape
    num_kv_heads, places = cache.k.shape[1:3]
    group = num_heads // num_kv_heads
    lanes = lanes_a_key(head_dim)
    heads = decode_region.query_heads_a_block(num_tokens * num_kv_heads, group, places, multiprocessors, cache.dtype, lanes)
    blocks = num_kv_heads * ceil_div(group, heads)  # a token
    if blocks > MAX_PAIRS:
        checks.reject("num_heads", f"of at most {MAX_PAIRS} blocks a token", num_heads)
    pairs = num_tokens * blocks
    crowded = decode_region.is_crowded(pairs, multiprocessors)
    splits = decode_region.num_splits(pairs, places, multiprocessors, cache.dtype, lanes, heads)
    out_dtype = cache.dtype if num_heads * head_dim % 16 == 0 else "fp32"
    out = kernels.new((num_tokens, num_heads * head_dim), CARRIER[out_dtype])
    work = kernels.new((decode_region.work_size(pairs, splits, heads, head_dim),), np.float32)
    if rotary is None or rotary.cos.shape[1] == 0:
        absent = kernels.or_absent(None)
        turn = absent.reshape(1, 1), absent.reshape(1, 1), cache.rows, 0, False
    else:
        turn = rotary.cos, rotary.sin, rotary.index, rotary.cos.shape[1], bool(rotary.interleaved)
    kernels.launch(
        decode_region.make_region(cache.dtype, lanes, heads, out_dtype, crowded),
        (num_tokens, blocks, splits), 32 * decode_region.warps_a_block(lanes, heads, crowded), 0,
        qkv, group, cache.k, cache.v, cache.rows, cache.ends, *turn, window, np.float32(scale),
        kernels.or_absent(slopes), slopes is not None, work, kernels.zero_counts(), out,
    )  # fmt: skip
    return out
