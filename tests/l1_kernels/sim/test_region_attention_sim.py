from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import region_attention_checks as checks

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_groups(device: Device, dtype: str, group: int) -> None:
    checks.check_step(device, dtype, [1, 37], group, 1, 16, rotated_dim=16)
