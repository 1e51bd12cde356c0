from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.sim
SIZES = [(1, 1), (7, 37)]


@pytest.mark.parametrize("kind", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_activation(device: Device, kind: str, num_tokens: int, width: int) -> None:
    checks.check_activation(device, kind, num_tokens, width)
