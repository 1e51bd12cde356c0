from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.linear import reference as linear
from l1_kernels.linear.cpu import FEW_ROWS
from l1_kernels.quantize import reference
from l1_kernels.weight import Weight, host_weight
from tests.l1_kernels import operation_checks as checks
from tests.l1_kernels.quantize_checks import activations, check_linear_w8a8


@pytest.mark.parametrize("kind", ["normal", "outliers", "huge", "sparse", "zeros"])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (7, 37), (3, 199), (2, 4096)])
def test_what_is_left_is_near(kind: str, num_tokens: int, size: int) -> None:
    """Of all but outliers at most half a step is lost, and a step is 1/127 of the largest of them or 1/16256 of the largest of all."""
    x = checks.wide(activations(checks.fresh(), kind, num_tokens, size))
    low, high, scale = reference.quantize_rows(x)
    assert low.dtype == high.dtype == np.int8 and scale.shape == (num_tokens,)
    assert np.abs(low).max() <= 127 and np.abs(high.astype(int)).max() <= 127
    left = reference.rounded(x)
    np.testing.assert_array_equal(left, scale[:, None] * (low + 128.0 * high))
    assert (np.abs(left - x) <= 0.5001 * scale[:, None]).all()
    outlier = high != 0
    inner = np.where(outlier, 0, np.abs(x)).max(1)
    assert (scale <= np.maximum(np.where(inner > 0, inner / 127, 1), np.abs(x).max(1) / 16256) * 1.0001).all()


@pytest.mark.parametrize("kind", ["normal", "outliers", "huge", "sparse", "zeros"])
def test_fine_planes_have_15_bits_for_every_number(kind: str) -> None:
    x = checks.wide(activations(checks.fresh(), kind, 7, 199))
    low, high, scale = reference.quantize_rows(x, fine=True)
    assert np.abs(low).max() <= 64 and np.abs(high.astype(int)).max() <= 127
    np.testing.assert_allclose(scale, np.where(np.abs(x).max(1) > 0, np.abs(x).max(1) / (127 * 128 + 63), 1))
    assert (np.abs(reference.rounded(x, fine=True) - x) <= 0.5001 * scale[:, None]).all()


def test_outliers_are_found_and_the_rest_keeps_its_step() -> None:
    x = activations(checks.fresh(), "outliers", 50, 64)
    _, high, scale = reference.quantize_rows(x)
    large = np.abs(x) > 100
    assert large.sum() == 300 and (high[large] != 0).all() and (high[~large] == 0).all()
    reached = np.abs(x).max(axis=1) / (127 * 128)  # what `high` needs for the largest
    assert (scale < np.maximum(6.5 / 127, 1.0001 * reached)).all()
    assert (np.where(large, 0, np.abs(reference.rounded(x) - x)) <= 0.5001 * scale[:, None] + 1e-6).all()


def test_normal_numbers_have_none() -> None:
    x = checks.fresh().standard_normal((200, 1000)).astype(np.float32)
    low, high, scale = reference.quantize_rows(x)
    assert not high.any()
    np.testing.assert_allclose(scale, np.abs(x).max(1) / 127, rtol=1e-6)
    np.testing.assert_array_equal(low, np.rint(x / scale[:, None]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_so(cpu: Device, bad: float) -> None:
    x = np.ones((3, 40), np.float32)
    x[1, 7] = bad
    for left in (reference.rounded(x), cpu.kernels.linear(x, w8a8(np.eye(40, dtype=np.float32)))):
        assert np.isnan(left[1]).all() and np.isfinite(left[[0, 2]]).all()


@pytest.mark.parametrize("kind", ["normal", "outliers", "huge", "sparse", "zeros"])
@pytest.mark.parametrize("num_tokens", [1, 7, FEW_ROWS + 1, 37])
@pytest.mark.parametrize(("num_out", "size"), [(1, 1), (7, 37), (199, 199)])
def test_cpu(cpu: Device, kind: str, num_tokens: int, num_out: int, size: int) -> None:
    check_linear_w8a8(cpu, kind, num_tokens, num_out, size)


def test_a_token_does_not_depend_on_the_others(cpu: Device) -> None:
    x = activations(checks.fresh(), "outliers", 9, 64)
    weight = w8a8(np.eye(64, dtype=np.float32))
    np.testing.assert_array_equal(cpu.kernels.linear(x, weight)[3:4], cpu.kernels.linear(x[3:4].copy(), weight))


def test_the_reference_rounds_x_for_such_a_weight_alone() -> None:
    x = checks.wide(activations(checks.fresh(), "normal", 3, 20))
    plain = host_weight(checks.normal(checks.fresh(), 5, 20), "int8")
    np.testing.assert_array_equal(linear.linear(x, Weight(plain.data, "int8", plain.scale, "int8")), linear.linear(reference.rounded(x), plain))
    assert (linear.linear(x, plain) != linear.linear(reference.rounded(x), plain)).any()


def test_only_int8_with_int8(cpu: Device) -> None:
    for weight in (Weight(np.ones((4, 6), np.float32), "fp32", None, "int8"), Weight(np.ones((4, 6), np.int8), "int8", np.ones(4, np.float32), "fp8")):
        with pytest.raises(ValueError, match="weight.act"):
            cpu.kernels.linear(np.ones((1, 6), np.float32), weight)


def w8a8(matrix: np.ndarray) -> Weight:
    plain = host_weight(matrix, "int8")
    return Weight(plain.data, "int8", plain.scale, "int8")
