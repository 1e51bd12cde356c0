from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.gpu
SIZES = [(1, 37, 199), (1, 1, 1), (2, 7, 37), (16, 199, 199), (17, 37, 7), (37, 199, 37), (199, 7, 199), (64, 256, 512)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), SIZES)
def test_linear(device: Device, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_linear(device, dtype, num_tokens, num_out, size)


@pytest.mark.parametrize("num_tokens", [3, 18])
def test_no_bias(device: Device, num_tokens: int) -> None:
    checks.check_linear(device, "fp32", num_tokens, 5, 7, with_bias=False)
