from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l1_kernels import region_checks as checks

pytestmark = pytest.mark.gpu
DTYPES = ["fp32", "fp16", "bf16", "int8"]
TOKENS = [1, 2, 8, 16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("num_out", "size"), [(4800, 1600), (1, 16), (199, 1040), (37, 6144)])
def test_norm_linear(device: Device, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, num_out, size, "layernorm")


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("num_tokens", [2, 16])
@pytest.mark.parametrize("size", [1600, 4096])
def test_norm_of_many_tokens_in_every_block(device: Device, dtype: str, num_tokens: int, size: int) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, 1031, size, "layernorm", norm_tokens=16)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 7, 37), (16, 7, 8192), (17, 64, 64), (16, 199, 12288)])
def test_other_ways(device: Device, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, num_out, size, "rmsnorm", with_bias=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("kind", "gated", "width"), [("gelu", False, 6400), ("silu", True, 1536), ("gelu_new", True, 199), ("relu", False, 7)])
def test_feed_forward(device: Device, dtype: str, num_tokens: int, kind: str, gated: bool, width: int) -> None:
    checks.check_feed_forward(device, dtype, num_tokens, width, 576, kind, gated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("num_out", "size"), [(1600, 6400), (199, 80)])
def test_linear_add(device: Device, dtype: str, num_tokens: int, carried: bool, num_out: int, size: int) -> None:
    checks.check_linear_add(device, dtype, num_tokens, num_out, size, carried)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("shared_norm", "gated"), [(True, False), (False, True)])
def test_norm_pair(device: Device, dtype: str, num_tokens: int, shared_norm: bool, gated: bool) -> None:
    checks.check_norm_pair(device, dtype, num_tokens, 1200, 3200, 512, shared_norm, gated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("carried", [False, True])
def test_linear_add_pair(device: Device, dtype: str, num_tokens: int, carried: bool) -> None:
    checks.check_linear_add_pair(device, dtype, num_tokens, 1031, 1024, 4096, carried)
