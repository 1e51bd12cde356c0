from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import operation_checks as checks

pytestmark = pytest.mark.sim
SIZES = [(1, 1), (3, 7), (2, 37), (1, 199)]
QKV_SIZES = [(1, 3, 7), (2, 4, 37)]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_layer_norm(device: Device, num_tokens: int, width: int, with_bias: bool) -> None:
    checks.check_layer_norm(device, num_tokens, width, with_bias)


@pytest.mark.parametrize(("num_tokens", "width"), SIZES)
def test_rms_norm(device: Device, num_tokens: int, width: int) -> None:
    checks.check_rms_norm(device, num_tokens, width)


@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), QKV_SIZES)
def test_norms_of_heads(device: Device, num_tokens: int, num_heads: int, head_dim: int) -> None:
    checks.check_qkv_norms(device, num_tokens, num_heads, head_dim)
