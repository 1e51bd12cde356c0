from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l3_moe import expert_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("kind", "gated", "with_bias"), [("silu", True, False), ("gelu", False, True)])
@pytest.mark.parametrize(("num_experts", "num_tokens", "top_k", "size", "width"), [(8, 1, 2, 2048, 1792), (128, 8, 1, 1024, 4096), (60, 3, 4, 208, 176)])
def test_pairs(
    device: Device, dtype: str, kind: str, gated: bool, with_bias: bool, num_experts: int, num_tokens: int, top_k: int, size: int, width: int
) -> None:
    checks.check_experts(device, dtype, kind, gated, num_experts, top_k, num_tokens, size, width, with_bias)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(("kind", "gated", "with_bias"), [("silu", True, True), ("gelu_new", False, False)])
@pytest.mark.parametrize(("num_experts", "num_tokens", "top_k"), [(8, 16, 2), (8, 199, 2), (128, 512, 1), (3, 1, 1), (8, 700, 2)])
def test_rows(device: Device, dtype: str, kind: str, gated: bool, with_bias: bool, num_experts: int, num_tokens: int, top_k: int) -> None:
    """The last one is for the loop."""
    checks.check_experts(device, dtype, kind, gated, num_experts, top_k, num_tokens, 528, 256, with_bias, "rows")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(("num_experts", "num_tokens", "top_k"), [(8, 2, 2), (8, 16, 2), (128, 8, 1), (3, 16, 3), (60, 16, 8)])
def test_active(device: Device, dtype: str, num_experts: int, num_tokens: int, top_k: int) -> None:
    checks.check_experts(device, dtype, "silu", True, num_experts, top_k, num_tokens, 1040, 256, True, "active")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "size"), [(1, 8, 2, 2048), (8, 128, 1, 1024), (16, 60, 4, 2048), (3, 1, 1, 8192), (5, 512, 16, 4096)])
def test_gate(device: Device, dtype: str, kind: str, num_tokens: int, num_experts: int, top_k: int, size: int) -> None:
    checks.check_gate(device, dtype, kind, num_tokens, num_experts, top_k, size, over_all=True)
    checks.check_gate(device, dtype, kind, num_tokens, num_experts, top_k, size, over_all=False, equal=num_experts > 1)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_few_tokens(device: Device, dtype: str, num_tokens: int) -> None:
    checks.check_few_tokens(device, dtype, num_tokens)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(("num_tokens", "top_k", "size"), [(1, 2, 2048), (16, 1, 1024), (7, 8, 8192), (5, 2, 1608)])
def test_combine_norm(device: Device, dtype: str, kind: str, num_tokens: int, top_k: int, size: int) -> None:
    checks.check_combine_norm(device, kind, dtype, num_tokens, top_k, size)
