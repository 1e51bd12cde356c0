from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.sim
SHAPES = [(1,), (7, 37), (2, 3, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_add(device: Device, shape: tuple[int, ...]) -> None:
    checks.check_add(device, *shape)
