"""Region 2 for prompts (attention/prompt_region.py) against float64, for the simulator and the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels.attention import reference as attend
from l1_kernels.attention.prompt_region import attend_prompt
from l1_kernels.device import Device
from l1_kernels.kv_write import reference as kv_write
from l1_kernels.regions import CacheArgs, RotaryArgs
from l1_kernels.rotary import reference as rotate
from l1_kernels.weight import CARRIER, decode, encode
from tests.l1_kernels.attention_checks import LARGEST
from tests.l1_kernels.operation_checks import fresh, normal, poisoned, rounded, wide

ROUNDING = {"fp16": 2**-11, "bf16": 2**-8}


def check_attend_prompt(
    device: Device, dtype: str, lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int, turned: int = 0,
    interleaved: bool = False, window: int = 0,
) -> None:  # fmt: skip
    """Prompts of these lengths, each after 3 keys that its row has already; the first `turned` dimensions turn (0: no rotary)."""
    rng, past, scale = fresh(), 3, head_dim**-0.5
    num_tokens, places = sum(lengths), max(lengths) + past + 2
    rows = np.repeat(np.arange(len(lengths))[::-1], lengths).astype(np.int32)
    positions = np.concatenate([np.arange(past, past + n) for n in lengths]).astype(np.int32)
    qkv = normal(rng, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    caches = [encode(normal(rng, len(lengths), num_kv_heads, places, head_dim), dtype) for _ in range(2)]
    cos, sin = normal(rng, places, turned // 2), normal(rng, places, turned // 2)

    rotary, want_qkv = None, wide(qkv)
    if turned:
        rotary = RotaryArgs(*map(device.to_device, (cos, sin, positions)), interleaved)
        rotate.rotary(want_qkv, num_heads + num_kv_heads, wide(cos), wide(sin), positions, interleaved)
    want_caches = [cache.copy() for cache in caches]
    kv_write.write_kv(want_qkv.astype(np.float32), num_heads, *want_caches, dtype, rows, positions)
    want = attend.attention(
        rounded(want_qkv.astype(np.float32), dtype), num_heads, *want_caches, dtype, rows, positions + 1, window, scale, None
    )

    on_device: Any = [device.to_device(cache.copy()) for cache in caches]
    args = CacheArgs(*on_device, dtype, *map(device.to_device, (rows, positions, positions + 1)))
    before = device.launches()
    mixed = poisoned(device, attend_prompt, device.kernels, device.to_device(qkv), num_heads, rotary, args, window, scale, None)
    device.synchronize()
    assert device.launches() - before == 2
    host = device.to_host(mixed)
    assert host.dtype == CARRIER[dtype] and host.shape == want.shape
    for got, cache in zip(on_device, want_caches, strict=True):
        # A key that turned may be rounded the other way where float32 and float64 differ in the last place.
        got_numbers, numbers = decode(device.to_host(got), dtype), decode(cache, dtype)
        assert (np.abs(got_numbers - numbers) <= 2 * ROUNDING[dtype] * np.abs(numbers) + 1e-6).all()
        changed = (device.to_host(got) != cache).mean()
        assert changed < 0.01
    largest = np.abs(decode(want_caches[1], dtype)).max()
    error = np.abs(decode(host, dtype) - want)
    # One rounding of probabilities, one of the result; and keys rounded the other way.
    assert error.max() <= 3 * LARGEST[dtype] * largest, f"off by {error.max():.3g} of {largest:.3g}"
    assert error.mean() <= LARGEST[dtype] / 2
