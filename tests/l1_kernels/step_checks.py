"""The step kernel against float64: whole layers noted as a program, on poisoned memory, for the simulator and the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from l1_kernels.activation import reference as activation
from l1_kernels.attention import reference as attention
from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.regions import CacheArgs, RotaryArgs
from l1_kernels.rotary import reference as rotary
from l1_kernels.step.recorder import StepRegions
from l1_kernels.weight import Weight, decode, encode, host_weight
from tests.l1_kernels.operation_checks import normal, poisoned, wide
from tests.l1_kernels.region_checks import Case

ROUNDED = {"fp16": 2e-3, "int8": 2e-3, "bf16": 1.6e-2}  # of the largest number: a few roundings to 16 bits one after the other


@dataclass(frozen=True)
class Shape:
    """A layer, and the sequences that it works on: keys that each has before this step."""

    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    size: int = 64
    width: int = 96
    lengths: tuple[int, ...] = (5,)
    places: int = 8
    layers: int = 2
    outputs: int = 21
    norm: str = "layernorm"
    kind: str = "gelu_new"
    gated: bool = False
    parallel: bool = False
    own_norms: bool = False  # of the two halves of a parallel layer
    bias: bool = True
    rotated: int = 8  # dimensions, 0: none
    interleaved: bool = False
    window: int = 0
    alibi: bool = False


def step_regions(device: Device, blocks: int, warps: int = 15, shared: int | None = None) -> StepRegions:
    kernels: Any = device.kernels
    more = {} if shared is None else {"shared": shared}
    return StepRegions(kernels, FusedRegions(kernels, blocks), blocks, device.to_device, warps, **more)


def check_step(device: Device, dtype: str, shape: Shape, blocks: int, warps: int = 15, shared: int | None = None) -> None:
    """One launch for all of it, the right numbers, the right cache, and nothing else touched."""
    s, num_tokens = shape, len(shape.lengths)
    case = Case(device, dtype, num_tokens, s.size)
    regions = step_regions(device, blocks, warps, shared)
    rng, cache_dtype = case.rng, "bf16" if dtype == "bf16" else "fp16"
    up = device.to_device
    rows = rng.permutation(num_tokens + 1)[:num_tokens].astype(np.int32)
    positions = np.array(s.lengths, np.int32)
    angles = rng.standard_normal((s.places, s.rotated // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turn = RotaryArgs(up(cos), up(sin), up(positions), s.interleaved) if s.rotated else None
    slopes = rng.uniform(0.01, 0.3, s.heads).astype(np.float32) if s.alibi else None
    scale = s.head_dim**-0.5
    x_host = case.x
    x, want = up(x_host.copy()), wide(x_host)
    final, final_reference = case.norm(s.norm, s.size)
    head = matrix(case, s.outputs, s.size, False)
    qkv_rows = (s.heads + 2 * s.kv_heads) * s.head_dim
    layers = []
    for _ in range(s.layers):
        caches = [encode(normal(rng, num_tokens + 1, s.kv_heads, s.places, s.head_dim), cache_dtype) for _ in range(2)]
        for cache in caches:
            for t in range(num_tokens):  # what is not there yet
                cache[rows[t], :, positions[t] :] = encode(np.full(1, np.nan, np.float32), cache_dtype)[0]
        first, second = case.norm(s.norm, s.size), case.norm(s.norm, s.size)
        matrices = [
            matrix(case, qkv_rows, s.size, s.bias), matrix(case, s.size, s.heads * s.head_dim, s.bias and not s.parallel),
            matrix(case, 2 * s.width if s.gated else s.width, s.size, s.bias), matrix(case, s.size, s.width, s.bias),
        ]  # fmt: skip
        layers.append((caches, [up(cache.copy()) for cache in caches], first, second if not s.parallel or s.own_norms else first, matrices))

    def run() -> Any:
        y = x
        with regions.sequence():
            for _, (k, v), (norm, _), (norm2, _), (qkv, out, wide_up, down) in layers:
                place = CacheArgs(k, v, cache_dtype, up(rows), up(positions), up(positions + 1), True)
                if s.parallel:
                    projected, hidden = regions.norm_pair(y, (norm, norm2), qkv[:2], wide_up[:2], s.kind, s.gated)
                else:
                    projected = regions.norm_linear(y, norm, *qkv[:2])
                heads = projected.reshape(num_tokens, s.heads + 2 * s.kv_heads, s.head_dim)
                mixed = regions.attend(heads, s.heads, turn, place, s.window, scale, None if slopes is None else up(slopes))
                if s.parallel:
                    y = regions.linear_add_pair(mixed, out[:2], hidden, down[:2], y)
                else:
                    y = regions.linear_add(mixed, *out[:2], y)
                    hidden = regions.norm_feed_forward(y, norm2, *wide_up[:2], s.kind, s.gated)
                    y = regions.linear_add(hidden, *down[:2], y)
            return regions.norm_linear(y, final, *head[:2])

    before = kernels_launched(device)
    logits = poisoned(device, run)
    assert regions.launched == 1 and kernels_launched(device) == before + 1

    for caches, on_device, (_, reference), (_, reference2), (qkv, out, wide_up, down) in layers:
        heads = (reference(want) @ qkv[2].T + qkv[3]).reshape(num_tokens, -1, s.head_dim)
        if s.rotated:
            rotary.rotary(heads, s.heads + s.kv_heads, wide(cos), wide(sin), positions, s.interleaved)
        new = [heads[:, s.heads : s.heads + s.kv_heads], heads[:, s.heads + s.kv_heads :]]
        for cache, kept, numbers in zip(caches, on_device, new, strict=True):
            got = device.to_host(kept)
            written = decode(got[rows, :, positions], cache_dtype)
            assert np.abs(written - numbers).max() <= 2 * ROUNDED[dtype] * np.abs(numbers).max()
            got = got.copy()
            got[rows, :, positions] = cache[rows, :, positions]
            assert np.array_equal(got, cache), "the cache was written to at another place"
            cache[rows, :, positions] = encode(numbers.astype(np.float32), cache_dtype)
        mixed = attention.attention(heads, s.heads, *caches, cache_dtype, rows, positions + 1, s.window, scale, slopes)
        normed = reference2(want)
        want = want + mixed @ out[2].T + out[3]
        if not s.parallel:
            normed = reference2(want)
        hidden = normed @ wide_up[2].T + wide_up[3]
        hidden = activation.gate(hidden, s.kind) if s.gated else activation.activate(hidden, s.kind)
        want = want + hidden @ down[2].T + down[3]
    close(device.to_host(x), want, dtype)
    close(device.to_host(logits), final_reference(want) @ head[2].T, dtype)


def matrix(case: Case, num_out: int, size: int, with_bias: bool) -> tuple[Weight, Any, np.ndarray, np.ndarray]:
    """As Case.matrix, but products are about as large as x: with larger ones a softmax picks one key, by the last digit."""
    host = host_weight(normal(case.rng, num_out, size) / np.float32(size**0.5), case.dtype)
    bias = normal(case.rng, num_out) if with_bias else None
    numbers = wide(decode(host.data, host.dtype, host.scale))
    return case.device.weight(host), None if bias is None else case.device.to_device(bias), numbers, wide(np.zeros(num_out) if bias is None else bias)


def kernels_launched(device: Device) -> int:
    kernels: Any = device.kernels
    return kernels.launches


def close(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error <= ROUNDED[dtype] * 2, f"off by {error:.2g} of the largest"  # a NaN fails too


