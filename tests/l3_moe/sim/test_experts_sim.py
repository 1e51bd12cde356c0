from __future__ import annotations

import pytest

from l1_kernels.device import Device
from tests.l3_moe import expert_checks as checks

pytestmark = pytest.mark.sim


@pytest.mark.parametrize(
    ("dtype", "kind", "gated", "with_bias", "num_tokens", "top_k"),
    [("fp32", "silu", True, False, 1, 2), ("fp16", "silu", True, True, 2, 2), ("bf16", "gelu", False, True, 1, 3), ("int8", "silu", True, False, 2, 1)],
)
def test_pairs(device: Device, dtype: str, kind: str, gated: bool, with_bias: bool, num_tokens: int, top_k: int) -> None:
    checks.check_experts(device, dtype, kind, gated, 3, top_k, num_tokens, 32, 16, with_bias)


@pytest.mark.parametrize(
    ("dtype", "kind", "gated", "with_bias", "num_tokens", "top_k"),
    [("fp16", "silu", True, False, 1, 1), ("bf16", "gelu_new", False, True, 19, 2), ("int8", "silu", True, True, 7, 2)],
)
def test_rows(device: Device, dtype: str, kind: str, gated: bool, with_bias: bool, num_tokens: int, top_k: int) -> None:
    checks.check_experts(device, dtype, kind, gated, 2, top_k, num_tokens, 80, 16, with_bias, "rows")


@pytest.mark.parametrize(("dtype", "num_experts", "num_tokens", "top_k"), [("fp16", 3, 2, 2), ("int8", 7, 2, 1), ("bf16", 2, 17, 1)])
def test_active(device: Device, dtype: str, num_experts: int, num_tokens: int, top_k: int) -> None:
    checks.check_experts(device, dtype, "silu", True, num_experts, top_k, num_tokens, 64, 16, True, "active")


@pytest.mark.parametrize(
    ("kind", "num_tokens", "num_experts", "top_k", "size"), [("rmsnorm", 1, 8, 2, 48), ("layernorm", 2, 3, 3, 1032), ("rmsnorm", 3, 60, 4, 64), ("layernorm", 1, 1, 1, 4104), ("rmsnorm", 1, 17, 2, 4104)]
)
def test_gate(device: Device, kind: str, num_tokens: int, num_experts: int, top_k: int, size: int) -> None:
    checks.check_gate(device, "fp16", kind, num_tokens, num_experts, top_k, size, over_all=num_tokens > 1, equal=num_experts > 3)


def test_few_tokens(device: Device) -> None:
    checks.check_few_tokens(device, "fp16", 1)
    checks.check_few_tokens(device, "fp16", 3)


@pytest.mark.parametrize(("kind", "dtype", "num_tokens", "top_k", "size"), [("rmsnorm", "fp16", 1, 2, 48), ("layernorm", "bf16", 3, 1, 264), ("rmsnorm", "fp16", 2, 5, 1032)])
def test_combine_norm(device: Device, kind: str, dtype: str, num_tokens: int, top_k: int, size: int) -> None:
    checks.check_combine_norm(device, kind, dtype, num_tokens, top_k, size)
