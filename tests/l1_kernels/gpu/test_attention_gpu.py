from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.attention import prompt, reference
from l1_kernels.device import Device
from l1_kernels.weight import encode
from tests.l1_kernels import attention_checks as kernel_checks
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.gpu
SIZES = [([1], 1, 1, 1), ([7, 0, 2], 4, 2, 7), ([199, 37], 6, 2, 37), ([37, 1], 4, 4, 64), ([600], 8, 1, 128), ([199], 3, 3, 256)]
WINDOW_ENDS = [1, 6, 9, 199]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("ends", "num_heads", "num_kv_heads", "head_dim"), SIZES)
def test_attention(device: Device, dtype: str, ends: list[int], num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    checks.check_attention(device, dtype, ends, num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize("window", [1, 5, 1000])
def test_window(device: Device, window: int) -> None:
    checks.check_attention(device, "fp32", WINDOW_ENDS, 2, 1, 8, window=window)


@pytest.mark.parametrize("window", [0, 3])
def test_alibi(device: Device, window: int) -> None:
    checks.check_attention(device, "fp16", WINDOW_ENDS, 3, 3, 8, window=window, alibi=True)


# The kernels by name, at sizes that fill a GPU


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 16), (2, 2, 24), (4, 4, 64), (4, 2, 80), (7, 1, 128), (2, 2, 256), (8, 1, 256), (71, 1, 64), (3, 1, 40)],
)
def test_decode(device: Device, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    kernel_checks.check_kernel(device, "decode", dtype, [3, 0, 1, 2], [1, 2047, 0, 1300], num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [1, 31, 32, 33, 1000, 100000])
def test_decode_window(device: Device, window: int, alibi: bool) -> None:
    kernel_checks.check_kernel(device, "decode", "fp16", [0, 1, 2, 3], [1, 32, 33, 3000], 4, 2, 128, window=window, alibi=alibi)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_decode_of_a_long_context(gpu: Device, dtype: str) -> None:
    for head_dim, num_heads in ((128, 4), (256, 1)):
        kernel_checks.check_kernel(gpu, "decode", dtype, [1, 0], [8192, 8001], num_heads, 1, head_dim)


def test_decode_of_a_prompt(gpu: Device) -> None:
    """Many blocks, none of them split."""
    kernel_checks.check_kernel(gpu, "decode", "fp32", *kernel_checks.sequences([300, 1, 77], 20, True), 4, 4, 64)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 16), (2, 1, 24), (4, 4, 64), (2, 1, 80), (7, 1, 128), (3, 1, 200), (2, 2, 256)]
)
@pytest.mark.parametrize("lengths", [[40], [200, 1, 37, 64, 65]], ids=str)
def test_prompt(device: Device, lengths: list[int], dtype: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    kernel_checks.check_kernel(device, "prompt", dtype, *kernel_checks.sequences(lengths, 3, True), num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 100])
@pytest.mark.parametrize("past", [0, 300])
def test_ragged_prompts(gpu: Device, causal: bool, window: int, past: int) -> None:
    rows, ends = kernel_checks.sequences([7, 128, 1, 400, 2, 63], past, causal)
    for head_dim in (64, 128, 256):
        kernel_checks.check_kernel(gpu, "prompt", "fp16", rows, ends, 4, 2, head_dim, window=window, alibi=window != 1)


def test_large_prompts_in_every_tile(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, ends = kernel_checks.sequences([1000, 333], 0, True)
    for head_dim in (64, 256):
        for warps in (1, 2, 4)[: 3 if head_dim == 64 else 2]:
            monkeypatch.setattr(prompt, "warps_a_block", lambda num_tokens, num_heads, head_dim, warps=warps: warps)
            kernel_checks.check_kernel(gpu, "prompt", "bf16", rows, ends, 2, 1, head_dim)


def test_large_scores(gpu: Device) -> None:
    kernel_checks.check_kernel(gpu, "prompt", "fp16", *kernel_checks.sequences([200], 0, True), 2, 2, 64, spread=100)


def test_a_graph_replays_while_lengths_grow(gpu: Device) -> None:
    """From one stretch to many and back: the lengths lie on the device, the grid never changes."""
    rng = checks.fresh()
    qkv = checks.normal(rng, 2, 3 * 4, 128)
    caches = [encode(checks.normal(rng, 2, 4, 2048, 128), "fp16") for _ in range(2)]
    rows, ends = np.array([1, 0], np.int32), gpu.zeros(2, np.int32)
    fixed = gpu.to_device(qkv), 4, *map(gpu.to_device, caches), "fp16", gpu.to_device(rows)
    graph = gpu.capture(lambda: gpu.kernels.attention(*fixed, ends, 0, 0.1, None))
    for lengths in ([1, 31], [32, 33], [2048, 700], [5, 2000], [0, 1]):
        now = np.array(lengths, np.int32)
        ends[...] = gpu.to_device(now)
        want = reference.attention(checks.wide(qkv), 4, *caches, "fp16", rows, now, 0, 0.1, None)
        checks.close(gpu, graph.replay(), want, "attention", 4.0)
