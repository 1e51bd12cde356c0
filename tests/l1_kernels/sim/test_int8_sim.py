"""W8A8 on the simulator: rounding, product and regions. `HostInt8` stands for the library's int8 product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.quantize import reference
from l1_kernels.quantize.launch import quantized
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Weight, encode, host_weight
from tests.l1_kernels import quantize_checks as checks
from tests.l1_kernels.operation_checks import fresh, poisoned

pytestmark = pytest.mark.sim
KINDS = ["normal", "outliers", "huge", "sparse", "zeros"]


class HostInt8:
    """A library that multiplies int8 and nothing else."""

    calls = 0

    def usable(self) -> bool:
        return False

    def takes_int8(self, num_out: int, size: int) -> bool:
        return num_out % 4 == 0

    def int8(self, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
        assert x.dtype == w.dtype == np.int8 and y.dtype == np.int32
        self.calls += 1
        y[...] = x.astype(np.int32) @ w.astype(np.int32).T

    def __call__(self, *_: Any) -> bool:
        raise AssertionError("only int8 products are its")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 37), (2, 199), (1, 300)])
@pytest.mark.parametrize("fine", [False, True])
def test_rounding_is_the_references(device: Device, fine: bool, kind: str, num_tokens: int, size: int) -> None:
    """A number at the middle between two steps may go to either: one step of `low`."""
    x = checks.activations(fresh(), kind, num_tokens, size)
    planes = poisoned(device, quantized, device.kernels, device.to_device(x), None, "fp32", fine)
    low, high, scale = reference.quantize_rows(x.astype(np.float64), fine)
    np.testing.assert_allclose(planes.scale, scale, rtol=2e-6)
    whole = planes.low.astype(int) + 128 * planes.high.astype(int)
    off = np.abs(whole - (low.astype(int) + 128 * high.astype(int)))
    assert off.max() <= 1 and (off != 0).mean() < 0.03
    assert fine or ((planes.high != 0) == (high != 0)).all()


def test_16_bits_and_what_is_not_finite(device: Device) -> None:
    x = checks.activations(fresh(), "normal", 3, 40)
    x[1, 7] = np.inf
    planes = poisoned(device, quantized, device.kernels, encode(x, "fp16"), None, "fp16")
    assert np.isnan(planes.scale[1]) and np.isfinite(planes.scale[[0, 2]]).all()
    x[1, 7] = np.nan
    planes = poisoned(device, quantized, device.kernels, x, None, "fp32")
    assert np.isnan(planes.scale[1]) and np.isfinite(planes.scale[[0, 2]]).all()


@pytest.mark.parametrize("kind", ["outliers", "zeros"])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 7, 37), (5, 3, 37), (17, 18, 19)])
def test_linear(device: Device, kind: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_linear_w8a8(device, kind, num_tokens, num_out, size)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", None])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 37, 48), (7, 199, 16), (16, 19, 208), (9, 1, 1040), (2, 7, 37)])
def test_norm_linear(device: Device, norm: str | None, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_norm_linear(device, "outliers", norm, num_tokens, num_out, size)


def test_a_long_row(device: Device) -> None:
    """More pieces than a block's warps take at once."""
    checks.check_norm_linear(device, "normal", "rmsnorm", 2, 3, 16 * 199)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize(("kind", "gated", "width"), [("gelu", False, 37), ("silu", True, 32), ("gelu_new", True, 7), ("relu", False, 1)])
def test_feed_forward(device: Device, num_tokens: int, kind: str, gated: bool, width: int) -> None:
    checks.check_feed_forward(device, num_tokens, width, 32, kind, gated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "carried", "add"), [(1, True, True), (7, False, True), (16, True, False)])
def test_linear_add(device: Device, kind: str, num_tokens: int, carried: bool, add: bool) -> None:
    checks.check_linear_add(device, kind, num_tokens, 19, 80, carried, add)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("shared", "gated"), [(True, False), (False, True), (True, True)])
def test_pairs(device: Device, num_tokens: int, shared: bool, gated: bool) -> None:
    checks.check_norm_pair(device, num_tokens, shared, gated)
    checks.check_linear_add_pair(device, num_tokens)


def test_many_tokens_without_a_library(device: Device) -> None:
    checks.check_norm_linear(device, "outliers", "layernorm", 17, 19, 32)
    checks.check_linear_add(device, "normal", 19, 7, 32, True, True)


@pytest.mark.parametrize("num_out", [36, 37])
def test_many_tokens_by_a_librarys_int8(device: Device, num_out: int) -> None:
    library = HostInt8()
    checks.check_norm_linear(device, "outliers", "layernorm", 19, num_out, 32, library)
    checks.check_feed_forward(device, 17, num_out, 16, "silu", True, library)
    checks.check_linear_add(device, "huge", 17, num_out, 32, True, True, library)
    checks.check_linear_add(device, "normal", 17, num_out, 32, False, False, library)
    assert library.calls == (4 if num_out % 4 == 0 else 0)


def test_many_tokens_of_w8a16_by_a_librarys_int8(device: Device) -> None:
    library = HostInt8()
    checks.check_norm_linear(device, "outliers", "layernorm", 19, 20, 32, library, None)
    checks.check_feed_forward(device, 17, 20, 16, "silu", True, library, None)
    checks.check_linear_add(device, "huge", 17, 20, 32, True, True, library, None)
    assert library.calls == 3


def test_launches(device: Device) -> None:
    """The table at the head of int8_regions.py."""
    rng = np.random.default_rng(0)

    def count(num_tokens: int, library: Any) -> list[int]:
        x = device.to_device(rng.standard_normal((num_tokens, 16)).astype(np.float32))
        plain = host_weight(rng.standard_normal((16, 16)).astype(np.float32), "int8")
        weight, ones = device.weight(Weight(plain.data, "int8", plain.scale, "int8")), device.to_device(np.ones(16, np.float32))
        norm, kernels = NormArgs("layernorm", ones, ones, 1e-5), device.kernels
        regions = FusedRegions(kernels, 2, gemm=library)  # type: ignore[arg-type]
        found = []
        for region in (
            lambda: regions.norm_linear(x, norm, weight, ones),
            lambda: regions.norm_feed_forward(x, norm, weight, ones, "gelu", False),
            lambda: regions.linear_add(x, weight, ones, x.copy()),
        ):
            before = kernels.launches + (library.calls if library else 0)
            region()
            found.append(kernels.launches + (library.calls if library else 0) - before)
        return found

    assert count(3, None) == [2, 2, 2]
    assert count(17, HostInt8()) == [3, 4, 3]


def test_wrong_arguments_are_named(device: Device) -> None:
    plain = host_weight(np.ones((8, 16), np.float32), "int8")
    weight, x = Weight(plain.data, "int8", plain.scale, "int8"), np.ones((2, 16), np.float32)
    regions = FusedRegions(device.kernels, 2)  # type: ignore[arg-type]
    norm = NormArgs("layernorm", np.ones(8, np.float32), None, 1e-5)
    for name, call in (
        ("norm.weight", lambda: regions.norm_linear(x, norm, weight, None)),
        ("bias", lambda: regions.norm_linear(x, None, weight, np.ones(7, np.float32))),
        ("residual", lambda: regions.linear_add(x, weight, None, np.ones((2, 7), np.float32))),
        ("x", lambda: regions.linear_add(x.astype(np.float64), weight, None, None)),
        ("weight.scale", lambda: regions.linear_add(x, Weight(plain.data, "int8", None, "int8"), None, None)),
        ("kind", lambda: regions.norm_feed_forward(x, None, weight, None, "tanh", False)),
    ):
        with pytest.raises(ValueError, match=f"argument {name} "):
            call()
