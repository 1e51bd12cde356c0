from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.linear import reference
from l1_kernels.linear.cpu import FEW_ROWS, SERIAL_BYTES, TILE_BYTES
from l1_kernels.weight import Weight, encode, host_weight
from tests.l1_kernels import operation_checks as checks

DTYPES = ["fp32", "fp16", "bf16", "int8"]


def test_reference_is_the_double_sum() -> None:
    rng = checks.fresh()
    x, w, b = rng.standard_normal((3, 5)), rng.standard_normal((4, 5)), rng.standard_normal(4)
    got = reference.linear(x, Weight(w, "fp32"), b)
    want = [[sum(x[t, k] * w[n, k] for k in range(5)) + b[n] for n in range(4)] for t in range(3)]
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7, FEW_ROWS, FEW_ROWS + 1, 37])
@pytest.mark.parametrize(("num_out", "size"), [(1, 1), (7, 37), (37, 7), (199, 199)])
def test_cpu(cpu: Device, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_linear(cpu, dtype, num_tokens, num_out, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_all_threads(cpu: Device, dtype: str, num_tokens: int) -> None:
    """Large enough to be spread, with a number of rows that divides over no threads evenly."""
    checks.check_linear(cpu, dtype, num_tokens, SERIAL_BYTES // 199 + 12, 199, with_bias=False)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_several_tiles(cpu: Device, dtype: str) -> None:
    size = 1999
    checks.check_linear(cpu, dtype, FEW_ROWS + 1, TILE_BYTES // (4 * size) + 3, size)


def test_every_fp16_and_bf16(cpu: Device) -> None:
    """All 65536 bit patterns times 1: the number itself, bit for bit, be it subnormal, infinite or NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    for dtype, want in (("fp16", bits.view(np.float16).astype(np.float32)), ("bf16", (bits.astype(np.uint32) << 16).view(np.float32))):
        for num_tokens in (1, 2, FEW_ROWS + 1):
            with np.errstate(invalid="ignore"):  # BLAS meets signalling NaNs
                got = cpu.kernels.linear(np.ones((num_tokens, 1), np.float32), Weight(bits, dtype))
            np.testing.assert_array_equal(got, np.broadcast_to(want[:, 0], got.shape))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 6, FEW_ROWS + 1])
def test_nan_is_not_lost(cpu: Device, dtype: str, num_tokens: int) -> None:
    weight = np.ones((3, 40), np.float32)
    weight[1, 39] = np.nan
    y = cpu.kernels.linear(np.ones((num_tokens, 40), np.float32), host_weight(weight, dtype))
    assert np.isnan(y[:, 1]).all() and (y[:, [0, 2]] == 40).all()


def test_one_expert_of_a_stack(cpu: Device) -> None:
    rng = checks.fresh()
    stack, x = host_weight(checks.normal(rng, 3, 7, 37), "int8"), checks.normal(rng, 2, 37)
    want = reference.linear(checks.wide(x), Weight(stack.data[1], "int8", stack.scale[1]))
    np.testing.assert_allclose(cpu.kernels.linear(x, stack[1]), want, rtol=1e-4, atol=1e-4)


def test_int8_without_scale_is_refused(cpu: Device) -> None:
    data = np.ones((4, 6), np.int8)
    with pytest.raises(ValueError, match="weight.scale"):
        cpu.kernels.linear(np.ones((1, 6), np.float32), Weight(data, "int8"))
    with pytest.raises(ValueError, match="weight.scale"):
        cpu.kernels.linear(np.ones((1, 6), np.float32), Weight(encode(data, "fp32"), "fp32", np.ones(4, np.float32)))
