from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks


@pytest.mark.parametrize("shape", [(1,), (7, 37), (199, 3)])
def test_cpu(cpu: Device, shape: tuple[int, ...]) -> None:
    checks.check_add(cpu, *shape)
