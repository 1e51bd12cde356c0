"""Every rung of the SBI-GeMM ladder against float64."""

from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.sbi_gemm import ladder
from l1_kernels.weight import decode, host_weight
from tests.l1_kernels.operation_checks import fresh, normal, poisoned, wide
from tests.l1_kernels.region_checks import ROUNDING

pytestmark = pytest.mark.sim
SIMPLE = [rung for rung in ladder.RUNGS if rung not in ("wide", "tensor")]
SHAPES = [(1, 1, 1), (2, 7, 37), (1, 37, 7), (3, 33, 199)]


def check(device: Device, rung: str, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    rng = fresh()
    host = host_weight(normal(rng, num_out, size), dtype)
    x = normal(rng, num_tokens, size)
    multiply = ladder.prepare(rung, device.kernels, device.weight(host))  # type: ignore[arg-type]
    y = device.to_host(poisoned(device, multiply, device.to_device(x)))
    w = wide(decode(host.data, host.dtype, host.scale))
    rounding = ROUNDING[dtype] if rung == "tensor" else 2e-6  # tensor cores take x in 16 bits
    error = np.abs(y - wide(x) @ w.T)
    assert (error <= rounding * (np.abs(wide(x)) @ np.abs(w).T) + 1e-6).all()


@pytest.mark.parametrize("rung", SIMPLE)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), SHAPES)
def test_simple_rungs(device: Device, rung: str, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    check(device, rung, dtype, num_tokens, num_out, size)


@pytest.mark.parametrize(("rung", "dtype"), [("wide", "fp32"), ("wide", "fp16"), ("wide", "bf16"), ("tensor", "fp16"), ("tensor", "bf16"), ("tensor", "int8")])
@pytest.mark.parametrize(("num_out", "size"), [(1, 16), (7, 48), (37, 528)])
def test_fast_rungs(device: Device, rung: str, dtype: str, num_out: int, size: int) -> None:
    check(device, rung, dtype, 1, num_out, size)


@pytest.mark.parametrize("num_tokens", [7, 16])
def test_tokens_on_tensor_cores(device: Device, num_tokens: int) -> None:
    check(device, "tensor", "fp16", num_tokens, 37, 80)


@pytest.mark.parametrize("rung", ["wide", "tensor"])
def test_an_odd_k_is_refused(device: Device, rung: str) -> None:
    weight = device.weight(host_weight(np.ones((3, 37), np.float32), "fp16"))
    with pytest.raises(ValueError, match="argument weight must have a K of whole 16 bytes"):
        ladder.prepare(rung, device.kernels, weight)  # type: ignore[arg-type]
