from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.sim
SIZES = [(1, 7, 37), (5, 3, 37), (17, 18, 19)]  # skinny by 1, skinny by 4, tiled


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), SIZES)
def test_linear(device: Device, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_linear(device, dtype, num_tokens, num_out, size)


@pytest.mark.parametrize("num_tokens", [3, 18])
def test_no_bias(device: Device, num_tokens: int) -> None:
    checks.check_linear(device, "fp32", num_tokens, 5, 7, with_bias=False)
