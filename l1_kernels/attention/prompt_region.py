"""Region 2 (l1_kernels/regions.py) for prompts: two launches, rotary + cache write (kv_write/turned.py) and attention (prompt.py),
whose output is rounded for the product that follows.

A third launch cannot join them: a query's block reads keys that other blocks write.
"""

from __future__ import annotations

from l1_kernels import checks
from l1_kernels.attention.pick import pick
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.kv_write.turned import WARPS, make_turn_and_write
from l1_kernels.regions import CacheArgs, RotaryArgs
from l1_kernels.weight import CARRIER, Array


def attend_prompt(
    kernels: GpuKernels, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs, window: int, scale: float,
    slopes: Array | None,
) -> Array | None:  # fmt: skip
    """Regions.attend -> mixed [T, H d] in the caches' carrier; None, and nothing done, where prompt.py is not for these tokens."""
    checks.cache(qkv, num_heads, cache.k, cache.v, cache.dtype)
    num_tokens, _, head_dim = qkv.shape
    aligned = all(checks.is_aligned(array) for array in (qkv, cache.k, cache.v))
    if pick(cache.dtype, num_tokens, cache.k.shape[0], head_dim, aligned) != "prompt":
        return None
    for name, array in (("rows", cache.rows), ("positions", cache.positions), ("ends", cache.ends)):
        checks.array(array, name, INT32, (num_tokens,))
    if slopes is not None:
        checks.array(slopes, "slopes", FLOAT32, (num_heads,))
    if window < 0:
        checks.reject("window", "0 (the whole context) or positive", window)
    turn_and_write(kernels, qkv, num_heads, rotary, cache)
    mixed = kernels.new((num_tokens, num_heads * head_dim), CARRIER[cache.dtype])
    kernels.attend("prompt", qkv, num_heads, cache.k, cache.v, cache.dtype, cache.rows, cache.ends, window, scale, slopes, mixed)
    return mixed


def turn_and_write(kernels: GpuKernels, qkv: Array, num_heads: int, rotary: RotaryArgs | None, cache: CacheArgs) -> None:
    """Queries of qkv turned in place; keys, turned, and values to the caches. In qkv keys stay as they are."""
    num_tokens, heads, head_dim = qkv.shape
    if rotary is None:
        absent = kernels.or_absent(None)
        tables, interleaved, heads = (absent.reshape(1, 1), absent.reshape(1, 1), cache.rows), False, heads - num_heads
    else:
        checks.ranked(rotary.cos, "cos", FLOAT32, 2)
        checks.array(rotary.sin, "sin", FLOAT32, rotary.cos.shape)
        checks.array(rotary.index, "index", INT32, (num_tokens,))
        if 2 * rotary.cos.shape[1] > head_dim:
            checks.reject("cos", f"[P, r/2] with r <= {head_dim} (qkv's d)", checks.describe(rotary.cos))
        tables, interleaved = (rotary.cos, rotary.sin, rotary.index), bool(rotary.interleaved)
    kernels.launch(
        make_turn_and_write(cache.dtype, rotary is not None, interleaved), (num_tokens, ceil_div(heads, WARPS)), WARPS * 32, 0,
        qkv, num_heads, *tables, cache.k, cache.v, cache.rows, cache.positions,
    )  # fmt: skip


__all__ = ["attend_prompt", "turn_and_write"]
