from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.sim
SIZES = [(2, 1, 1), (3, 7, 2), (2, 37, 8), (2, 4, 4)]


@pytest.mark.parametrize(("softmax_first", "renormalise"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_route(device: Device, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool) -> None:
    checks.check_route(device, num_tokens, num_experts, top_k, softmax_first, renormalise)
