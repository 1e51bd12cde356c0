from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.regions import CacheArgs, RotaryArgs
from tests.l1_kernels import operation_checks
from tests.l1_kernels import region_attention_checks as checks

pytestmark = pytest.mark.gpu
DTYPES = ["fp32", "fp16", "bf16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotated_dim"),
    [(25, 25, 64, 0), (16, 16, 256, 64), (2, 2, 24, 10), (9, 3, 64, 64), (4, 2, 80, 20), (8, 1, 128, 128), (3, 1, 200, 2), (1, 1, 8, 8)],
)
@pytest.mark.parametrize("ends", [[1], [136], [37, 1, 199, 700]], ids=str)
def test_step(device: Device, ends: list[int], dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, rotated_dim: int) -> None:
    interleaved = rotated_dim in (64, 10)
    checks.check_step(device, dtype, ends, num_heads, num_kv_heads, head_dim, rotated_dim, interleaved, multiprocessors=132)


@pytest.mark.parametrize("num_heads", [4, 25])
def test_sixteen_tokens(device: Device, num_heads: int) -> None:
    """Of 25 heads each, more than there are multiprocessors."""
    checks.check_step(device, "fp16", [7, 1, 199, 37] * 4, num_heads, num_heads, 64, 64, multiprocessors=132)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [1, 31, 32, 33, 1000, 100000])
def test_window(device: Device, window: int, alibi: bool) -> None:
    checks.check_step(device, "fp16", [1, 32, 33, 3000], 4, 2, 128, 128, window=window, alibi=alibi, multiprocessors=132)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 128), (1, 256), (2, 64), (5, 256)])
def test_long_contexts(gpu: Device, dtype: str, num_heads: int, head_dim: int) -> None:
    checks.check_step(gpu, dtype, [8192, 8001, 64], num_heads, 1, head_dim, head_dim, multiprocessors=132)


@pytest.mark.parametrize("num_tokens", [2, 16])
def test_tokens_of_one_row(device: Device, num_tokens: int) -> None:
    checks.check_one_row(device, num_tokens)


def test_a_graph_replays_while_lengths_grow(gpu: Device) -> None:
    """From one stretch to many and back: ends and angles lie on the device, the grid never changes; the cache keeps what each step wrote."""
    kernels: Any = gpu.kernels
    regions, up, dtype = FusedRegions(kernels, 132), gpu.to_device, "fp16"
    step = checks.Step(gpu, dtype, [1, 1], 4, 4, 128, 128, places=2048)
    caches = [checks.encode(operation_checks.normal(operation_checks.fresh(), 3, 4, 2048, 128), dtype) for _ in range(2)]
    k, v = (up(cache.copy()) for cache in caches)
    ends, positions = gpu.zeros(2, np.int32) + np.int32(1), gpu.zeros(2, np.int32)
    rotary = RotaryArgs(*map(up, step.tables), up(step.index), False)
    args = CacheArgs(k, v, dtype, up(step.rows), positions, ends, True)
    qkv = up(step.qkv)
    graph = gpu.capture(lambda: regions.attend(qkv, 4, rotary, args, 0, step.scale, None))
    for lengths in ([1, 31], [32, 33], [2048, 700], [5, 2000], [385, 384]):
        step.ends = np.array(lengths, np.int32)
        ends[...] = up(step.ends)
        mixed = graph.replay()
        gpu.synchronize()
        want = step.wanted(gpu.to_host(k), gpu.to_host(v))
        assert np.abs(checks.decode(gpu.to_host(mixed), dtype) - want).max() <= 2**-10 * np.abs(want).max() + 2e-5


def test_what_takes_three_launches(device: Device) -> None:
    checks.check_what_takes_three_launches(device)


def test_rejections(device: Device) -> None:
    checks.check_rejections(device)


def test_no_tokens(device: Device) -> None:
    checks.check_no_tokens(device)
