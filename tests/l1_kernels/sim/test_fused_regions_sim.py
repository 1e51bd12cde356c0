from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import region_checks as checks

pytestmark = pytest.mark.sim
DTYPES = ["fp32", "fp16", "bf16", "int8"]
TOKENS = [1, 7, 16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", None])
def test_norm_linear(device: Device, dtype: str, num_tokens: int, kind: str | None) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, 37, 48, kind)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 1, 16), (1, 199, 16), (2, 7, 1040), (9, 1, 32), (1, 3, 1040)])
def test_awkward_sizes(device: Device, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, num_out, size, "layernorm", with_bias=False)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 37), (3, 7), (17, 16)])
def test_what_the_kernels_do_not_take(device: Device, num_tokens: int, size: int) -> None:
    checks.check_norm_linear(device, "fp16", num_tokens, 5, size, "layernorm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(("kind", "gated", "width"), [("gelu", False, 32), ("silu", True, 32), ("gelu_new", True, 7), ("relu", False, 7)])
def test_feed_forward(device: Device, dtype: str, num_tokens: int, kind: str, gated: bool, width: int) -> None:
    checks.check_feed_forward(device, dtype, num_tokens, width, 32, kind, gated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("carried", [False, True])
def test_linear_add(device: Device, dtype: str, num_tokens: int, carried: bool) -> None:
    checks.check_linear_add(device, dtype, num_tokens, 19, 80, carried)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_no_residual(device: Device, num_tokens: int) -> None:
    checks.check_linear_add(device, "bf16", num_tokens, 19, 80, True, add=False)


@pytest.mark.parametrize(("num_tokens", "size"), [(2, 24), (17, 32)])
def test_bits_that_fall_back_are_widened(device: Device, num_tokens: int, size: int) -> None:
    checks.check_linear_add(device, "int8", num_tokens, 5, size, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("shared_norm", "gated"), [(True, False), (False, True)])
def test_norm_pair(device: Device, dtype: str, num_tokens: int, shared_norm: bool, gated: bool) -> None:
    checks.check_norm_pair(device, dtype, num_tokens, 37, 32, 32, shared_norm, gated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("carried", [False, True])
def test_linear_add_pair(device: Device, dtype: str, num_tokens: int, carried: bool) -> None:
    checks.check_linear_add_pair(device, dtype, num_tokens, 19, 32, 80, carried)
