from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.gpu
SIZES = [(1, 1, 1, 1), (7, 4, 2, 5), (199, 6, 3, 37), (37, 8, 8, 128)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "head_dim"), SIZES)
def test_write_kv(device: Device, dtype: str, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    checks.check_write_kv(device, dtype, num_tokens, num_heads, num_kv_heads, head_dim)
