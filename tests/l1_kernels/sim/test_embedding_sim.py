from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.sim
SIZES = [(1, 3, 1), (7, 5, 37)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_rows", "width"), SIZES)
def test_embed(device: Device, dtype: str, num_tokens: int, num_rows: int, width: int) -> None:
    checks.check_embed(device, dtype, num_tokens, num_rows, width)
