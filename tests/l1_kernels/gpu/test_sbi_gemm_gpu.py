from __future__ import annotations

import pytest

from l1_kernels.device import Device
from l1_kernels.sbi_gemm import ladder
from tests.l1_kernels.rung_checks import check_rung

pytestmark = pytest.mark.gpu
SIMPLE = [rung for rung in ladder.RUNGS if rung not in ("wide", "tensor")]


@pytest.mark.parametrize("rung", SIMPLE)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 1, 1), (2, 7, 37), (1, 199, 1031), (3, 1024, 512)])
def test_simple_rungs(device: Device, rung: str, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    check_rung(device, rung, dtype, num_tokens, num_out, size)


@pytest.mark.parametrize(("rung", "dtype"), [("wide", "fp32"), ("wide", "fp16"), ("wide", "bf16"), ("tensor", "fp16"), ("tensor", "bf16"), ("tensor", "int8")])
@pytest.mark.parametrize(("num_out", "size"), [(1, 16), (199, 1040), (1600, 6400)])
def test_fast_rungs(device: Device, rung: str, dtype: str, num_out: int, size: int) -> None:
    check_rung(device, rung, dtype, 1, num_out, size)


@pytest.mark.parametrize("num_tokens", [2, 8, 16])
def test_tokens_on_tensor_cores(device: Device, num_tokens: int) -> None:
    check_rung(device, "tensor", "fp16", num_tokens, 199, 1600)
