from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.gpu
SIZES = [(1, 3, 2, 2), (7, 4, 37, 36), (37, 9, 64, 16), (199, 37, 128, 128)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim", "rotated_dim"), SIZES)
def test_rotary(device: Device, num_tokens: int, num_heads: int, head_dim: int, rotated_dim: int, interleaved: bool) -> None:
    checks.check_rotary(device, num_tokens, num_heads, head_dim, rotated_dim, interleaved)
