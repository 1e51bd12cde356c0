from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.attention import pick, prompt
from l1_kernels.device import Device
from l1_kernels.weight import encode
from tests.l1_kernels import attention_checks as kernel_checks
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.sim
SIZES = [([1], 1, 1, 1), ([7, 0, 2], 4, 2, 7), ([9], 2, 2, 37), ([3], 1, 1, 100), ([2], 1, 1, 199)]  # 0: no keys
WINDOW_ENDS = [1, 6, 9]


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


# The kernels by name

DECODE_SHAPES = [  # (H, G, d); the last two: more query heads than a block takes, and a width that leaves lanes without work
    (1, 1, 16), (2, 2, 24), (3, 3, 64), (4, 2, 80), (7, 1, 128), (2, 1, 256), (10, 1, 8), (16, 2, 40),
]  # fmt: skip


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), DECODE_SHAPES)
def test_decode(device: Device, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """One key, none, and more than a stretch; far more stretches than are in use."""
    kernel_checks.check_kernel(device, "decode", "fp16", [2, 0, 1], [1, 0, 70], num_heads, num_kv_heads, head_dim, places=150)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decode_of_other_dtypes(device: Device, dtype: str) -> None:
    kernel_checks.check_kernel(device, "decode", dtype, [1, 0], [37, 199], 3, 1, 72)


@pytest.mark.parametrize("window", [1, 31, 32, 33, 130, 1000])
def test_decode_window(device: Device, window: int) -> None:
    kernel_checks.check_kernel(device, "decode", "bf16", [0, 1, 2, 3], [1, 32, 33, 170], 1, 1, 128, window=window, alibi=window == 33)


@pytest.mark.parametrize("end", [63, 64, 65, 128])
def test_decode_at_the_edges_of_a_stretch(device: Device, end: int) -> None:
    kernel_checks.check_kernel(device, "decode", "fp16", [0], [end], 1, 1, 64, places=end)


def test_decode_without_room_to_split(device: Device) -> None:
    """A cache of one step: one stretch, and nothing goes through memory."""
    kernel_checks.check_kernel(device, "decode", "fp16", [1, 0], [5, 2], 4, 1, 64, places=5, alibi=True)


def test_decode_of_a_prompt(device: Device) -> None:
    """fp32 prompts come here, and so may any tokens of one row."""
    kernel_checks.check_kernel(device, "decode", "fp32", *kernel_checks.sequences([7, 3], 4, True), 2, 1, 16, window=5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 16), (2, 1, 24), (1, 1, 64), (1, 1, 80), (2, 2, 128), (1, 1, 256)])
def test_prompt(device: Device, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    kernel_checks.check_kernel(device, "prompt", dtype, *kernel_checks.sequences([37], 3, True), num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("past", [0, 13])
def test_ragged_prompts(device: Device, causal: bool, window: int, past: int) -> None:
    """Sequences that share tiles and that cross them, with and without ALiBi."""
    rows, ends = kernel_checks.sequences([7, 1, 40, 2], past, causal)
    kernel_checks.check_kernel(device, "prompt", "fp16", rows, ends, 2, 1, 16, window=window, alibi=window != 1)


def test_prompt_of_seven_heads_a_key_head(device: Device) -> None:
    kernel_checks.check_kernel(device, "prompt", "bf16", *kernel_checks.sequences([19, 5], 0, True), 7, 1, 64)


def test_prompt_with_tokens_without_keys_and_with_gaps(device: Device) -> None:
    """Far stretches of one row, between which nobody wrote, and tokens that see nothing."""
    rows, ends = [0] * 12 + [1, 1, 1] + [0] * 9, [*range(1, 13), 0, 0, 4, *range(100, 109)]
    kernel_checks.check_kernel(device, "prompt", "fp16", rows, ends, 1, 1, 16, window=6)


@pytest.mark.parametrize("warps", [1, 2, 4])
def test_prompt_tiles(device: Device, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "warps_a_block", lambda num_tokens, num_heads, head_dim: warps)
    rows, ends = kernel_checks.sequences([70, 33], 30, True)
    kernel_checks.check_kernel(device, "prompt", "fp16", rows, ends, 1, 1, 64)


def test_large_scores(device: Device) -> None:
    """Scores of some hundreds: without the running maximum exp would overflow."""
    rows, ends = kernel_checks.sequences([20], 0, True)
    kernel_checks.check_kernel(device, "prompt", "fp16", rows, ends, 1, 1, 64, spread=100)


def test_a_nan_key_is_not_lost(device: Device) -> None:
    """In the keys of the last token only: it and nobody else is NaN."""
    rng = checks.fresh()
    for num_tokens in (2, 20):
        qkv = checks.normal(rng, num_tokens, 3, 16)
        caches = [encode(checks.normal(rng, 1, 1, num_tokens, 16), "fp16") for _ in range(2)]
        caches[0][0, 0, -1, 5] = 0x7E00
        rows, ends = np.zeros(num_tokens, np.int32), np.arange(1, num_tokens + 1, dtype=np.int32)
        for kind in ("decode", "prompt"):
            out = np.zeros((num_tokens, 16), np.float32)
            device.kernels.attend(kind, qkv, 1, *caches, "fp16", rows, ends, 0, 0.25, None, out)
            assert np.isnan(out[-1]).all() and np.isfinite(out[:-1]).all(), kind


def test_what_is_picked() -> None:
    few, many = pick.FEW_TOKENS, pick.FEW_TOKENS + 1
    assert pick.pick("fp16", few, 1, 64, True) == "decode" and pick.pick("fp16", many, 1, 64, True) == "prompt"
    assert pick.pick("fp16", many, many, 64, True) == "decode"  # a token a row
    assert pick.pick("fp32", many, 1, 64, True) == "decode"
    assert pick.pick("fp16", 1, 1, 64, False) == pick.pick("fp16", 1, 1, 60, True) == pick.pick("bf16", many, 1, 12, True) == "simple"


def test_caches_that_are_not_aligned(device: Device) -> None:
    """A view that begins 2 bytes into its memory goes to the simple kernel."""
    memory = np.zeros(1 + 4 * 16, np.uint16)
    shifted = memory[1:].reshape(1, 1, 4, 16)
    qkv = checks.normal(checks.fresh(), 1, 3, 16)
    out = device.kernels.attention(qkv, 1, shifted, shifted, "fp16", np.zeros(1, np.int32), np.array([3], np.int32), 0, 1.0, None)
    assert (out == 0).all()
