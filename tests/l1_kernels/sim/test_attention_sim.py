from __future__ import annotations

import pytest

from l1_kernels.device import Device
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
