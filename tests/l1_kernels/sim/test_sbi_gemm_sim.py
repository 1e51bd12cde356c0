"""Every rung of the SBI-GeMM ladder against float64; that the production kernels read each weight once; launches a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from l1_kernels import ptx
from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm import ladder, launch
from l1_kernels.sbi_gemm.job import Job
from l1_kernels.sbi_gemm.tensor import Tensor
from l1_kernels.sbi_gemm.wide import Wide
from l1_kernels.weight import host_weight
from tests.l1_kernels.rung_checks import check_rung

pytestmark = pytest.mark.sim
SIMPLE = [rung for rung in ladder.RUNGS if rung not in ("wide", "tensor")]
SHAPES = [(1, 1, 1), (2, 7, 37), (1, 37, 7), (3, 33, 199)]


@pytest.mark.parametrize("rung", SIMPLE)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), SHAPES)
def test_simple_rungs(device: Device, rung: str, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    check_rung(device, rung, dtype, num_tokens, num_out, size)


@pytest.mark.parametrize(("rung", "dtype"), [("wide", "fp32"), ("wide", "fp16"), ("wide", "bf16"), ("tensor", "fp16"), ("tensor", "bf16"), ("tensor", "int8")])
@pytest.mark.parametrize(("num_out", "size"), [(1, 16), (7, 48), (37, 528)])
def test_fast_rungs(device: Device, rung: str, dtype: str, num_out: int, size: int) -> None:
    check_rung(device, rung, dtype, 1, num_out, size)


@pytest.mark.parametrize("num_tokens", [7, 16])
def test_tokens_on_tensor_cores(device: Device, num_tokens: int) -> None:
    check_rung(device, "tensor", "fp16", num_tokens, 37, 80)


@pytest.mark.parametrize("rung", ["wide", "tensor"])
def test_an_odd_k_is_refused(device: Device, rung: str) -> None:
    weight = device.weight(host_weight(np.ones((3, 37), np.float32), "fp16"))
    with pytest.raises(ValueError, match="argument weight must have a K of whole 16 bytes"):
        ladder.prepare(rung, device.kernels, weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "tokens", "plan"),
    [
        ("fp16", 1, Wide(2, 2, 2, 3)), ("fp16", 1, Wide(1, 1, 4, 3, 1)), ("fp16", 16, Tensor(1, 3, 1, 2, 2)),
        ("bf16", 3, Tensor(1, 3, 2, 1, 1, 1)), ("int8", 1, Tensor(1, 3, 1, 2)),
    ],
)  # fmt: skip
def test_each_weight_is_read_once(device: Device, monkeypatch: pytest.MonkeyPatch, dtype: str, tokens: int, plan: Wide | Tensor) -> None:
    """Counted, access by access. (No other test uses these plans: a kernel made before would have the plain load.)"""
    read = np.zeros((64, 400), np.int64)

    def load(array, index):
        read.reshape(-1)[index : index + 16 // array.itemsize] += 1
        return plain(array, index)

    def load_if(array, index, inside):
        return load(array, index) if inside else plain_if(array, index, inside)

    plain, plain_if = ptx.load16_stream, ptx.load16_stream_if
    monkeypatch.setattr(ptx, "load16_stream", load)
    monkeypatch.setattr(ptx, "load16_stream_if", load_if)
    weight = device.weight(host_weight(np.random.default_rng(1).standard_normal(read.shape).astype(np.float32), dtype))
    x, y = np.ones((tokens, read.shape[1]), np.float32), device.empty((tokens, read.shape[0]))
    launch.run(device.kernels, Job(dtype), plan, 2, launch.Operand(x, weight, None, y))  # type: ignore[arg-type]
    assert (read == 1).all()


@pytest.mark.parametrize(("num_tokens", "extra"), [(1, 0), (2, 1)])
def test_a_region_is_one_launch(device: Device, num_tokens: int, extra: int) -> None:
    """Beyond one token a norm is a launch of its own."""
    regions = FusedRegions(device.kernels, 2)  # type: ignore[arg-type]
    rng = np.random.default_rng(2)

    def weight(num_out: int, size: int) -> tuple[Any, Any]:
        return device.weight(host_weight(rng.standard_normal((num_out, size)).astype(np.float32), "fp16")), None

    def launches(call: Callable[[], Any]) -> int:
        before = device.launches()
        call()
        return device.launches() - before

    x = device.zeros((num_tokens, 32)) + np.float32(1)
    norm = NormArgs("rmsnorm", device.zeros(32), None, 1e-5)
    mixed, hidden = device.zeros((num_tokens, 16)), device.zeros((num_tokens, 48))
    assert launches(lambda: regions.norm_linear(x, norm, *weight(48, 32))) == 1 + extra
    assert launches(lambda: regions.norm_feed_forward(x, norm, *weight(96, 32), "silu", True)) == 1 + extra
    assert launches(lambda: regions.linear_add(mixed, *weight(32, 16), x)) == 1
    assert launches(lambda: regions.norm_pair(x, (norm, norm), weight(48, 32), weight(48, 32), "gelu", False)) == 1 + extra
    assert launches(lambda: regions.linear_add_pair(mixed, weight(32, 16), hidden, weight(32, 48), x)) == 1
