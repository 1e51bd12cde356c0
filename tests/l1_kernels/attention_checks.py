"""Checks of the GPU's attention kernels by name, beside operation_checks.check_attention, which takes the one that is picked."""

from __future__ import annotations

from typing import Any

import numpy as np

from l1_kernels.attention import reference
from l1_kernels.device import Device
from l1_kernels.weight import decode, encode
from tests.l1_kernels import operation_checks as checks

# The prompt kernel rounds probabilities to the cache's dtype: each by at most half of 2^-10 (fp16) or 2^-7 (bf16) of itself, in
# all directions, so a sum of p v is off by at most that part of the largest |v|, and by much less on average.
LARGEST = {"fp16": 2**-11, "bf16": 2**-8}


def sequences(lengths: list[int], past: int, causal: bool, step: int = 1) -> tuple[list[int], list[int]]:
    """rows and ends of sequences of these lengths, one after the other, with `past` keys of each in the cache before;
    of rows that do not follow the order."""
    rows: list[int] = []
    ends: list[int] = []
    for number, length in enumerate(lengths):
        row = (number * 3 + 1) % len(lengths) if len(lengths) % 3 else number
        rows += [row] * length
        ends += range(past + 1, past + length + 1) if causal else [past + length] * length
    return rows, ends


def check_kernel(
    device: Device, kind: str, dtype: str, rows: list[int], ends: list[int], num_heads: int, num_kv_heads: int, head_dim: int,
    window: int = 0, alibi: bool = False, places: int | None = None, spread: float = 2.0,
) -> None:  # fmt: skip
    """Kernel `kind` ("simple", "decode", "prompt") on tokens of any rows and ends; where no token of a row may look, the
    caches hold NaN. spread: of the queries."""
    kernels: Any = device.kernels
    rng = checks.fresh()
    num_tokens, num_rows = len(rows), max(rows) + 1
    places = max(ends) + 3 if places is None else places
    seen = np.zeros((num_rows, places), bool)
    for row, end in zip(rows, ends, strict=True):
        seen[row, max(0, end - window) if window else 0 : end] = True
    caches = []
    for _ in range(2):
        numbers = checks.normal(rng, num_rows, num_kv_heads, places, head_dim)
        numbers[np.broadcast_to(~seen[:, None], numbers.shape[:3])] = np.nan
        caches.append(encode(numbers, dtype))
    qkv = checks.normal(rng, num_tokens, num_heads + 2 * num_kv_heads, head_dim) * np.float32(spread)
    slopes = rng.uniform(0.01, 0.5, num_heads).astype(np.float32) if alibi else None
    rows_array, ends_array, scale = np.array(rows, np.int32), np.array(ends, np.int32), head_dim**-0.5
    multiplied = checks.rounded(qkv, dtype) if kind == "prompt" else checks.wide(qkv)
    want = reference.attention(multiplied, num_heads, *caches, dtype, rows_array, ends_array, window, scale, slopes)

    out = device.empty((num_tokens, num_heads * head_dim))
    out.fill(np.nan)
    arguments = [device.to_device(qkv), num_heads, *map(device.to_device, caches), dtype]
    arguments += [device.to_device(rows_array), device.to_device(ends_array), window, scale, None if slopes is None else device.to_device(slopes)]
    for _ in range(2):  # the second finds the counts that the first left
        checks.poisoned(device, kernels.attend, kind, *arguments, out)
        largest = float(np.nanmax(np.abs(decode(caches[1], dtype)), initial=0))
        if kind != "prompt":
            checks.close(device, out, want, "attention", largest)
            continue
        device.synchronize()
        error = np.abs(device.to_host(out) - want)
        assert error.max(initial=0) <= LARGEST[dtype] * largest, f"off by {error.max():.3g} of {largest:.3g}"
        assert error.mean() <= LARGEST[dtype] / 8
        assert not error[np.repeat(ends_array == 0, 1)].any()  # no keys: exact zeros
