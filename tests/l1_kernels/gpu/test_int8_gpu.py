"""W8A8 on a GPU: our kernel up to 16 tokens, cuBLAS's int8 product beyond."""

from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from tests.l1_kernels import quantize_checks as checks

pytestmark = pytest.mark.gpu
KINDS = ["normal", "outliers", "huge", "sparse", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 7, 37), (16, 199, 199), (7, 37, 1040)])
def test_linear(device: Device, kind: str, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_linear_w8a8(device, kind, num_tokens, num_out, size)


@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_linear_of_many_tokens(device: Device, kind: str) -> None:
    """Without regions: what int8 leaves of x, rounded to fp16 for cuBLAS."""
    checks.check_linear_w8a8(device, kind, 37, 199, 200, rounding=2**-11)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", None])
@pytest.mark.parametrize(("num_tokens", "num_out", "size"), [(1, 37, 48), (7, 199, 16), (16, 19, 208), (9, 1, 1040), (2, 4100, 4096), (8, 5, 16384)])
def test_norm_linear(device: Device, norm: str | None, num_tokens: int, num_out: int, size: int) -> None:
    checks.check_norm_linear(device, "outliers", norm, num_tokens, num_out, size)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize(("kind", "gated", "width"), [("gelu", False, 37), ("silu", True, 32), ("gelu_new", True, 7), ("relu", False, 1)])
def test_feed_forward(device: Device, num_tokens: int, kind: str, gated: bool, width: int) -> None:
    checks.check_feed_forward(device, num_tokens, width, 32, kind, gated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "carried", "add"), [(1, True, True), (7, False, True), (16, True, False)])
def test_linear_add(device: Device, kind: str, num_tokens: int, carried: bool, add: bool) -> None:
    checks.check_linear_add(device, kind, num_tokens, 19, 80, carried, add)


def test_pairs(device: Device) -> None:
    for shared, gated in ((True, False), (False, True)):
        checks.check_norm_pair(device, 5, shared, gated)
    checks.check_linear_add_pair(device, 5)


@pytest.mark.parametrize("num_tokens", [17, 37, 128, 199])
@pytest.mark.parametrize(("num_out", "size"), [(64, 64), (200, 1040), (4096, 1024)])
@pytest.mark.parametrize("act", ["int8", None])
def test_many_tokens_by_cublas(device: Device, act: str | None, num_tokens: int, num_out: int, size: int) -> None:
    library = device.regions.fused.unfused.gemm if hasattr(device.regions, "fused") else device.regions.unfused.gemm  # type: ignore[attr-defined]
    assert library.takes_int8(num_out, size)
    checks.check_norm_linear(device, "outliers", "layernorm", num_tokens, num_out, size, library, act)
    checks.check_feed_forward(device, num_tokens, num_out, size, "silu", True, library, act)
    checks.check_linear_add(device, "huge", num_tokens, num_out, size, True, True, library, act)


def test_the_librarys_product_is_exact_and_captured(device: Device) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-127, 128, (37, 1024), dtype=np.int8), rng.integers(-127, 128, (72, 1024), dtype=np.int8)
    library = device.regions.fused.unfused.gemm if hasattr(device.regions, "fused") else device.regions.unfused.gemm  # type: ignore[attr-defined]
    on_x, on_w, y = device.to_device(x), device.to_device(w), device.zeros((37, 72), np.int32)
    want = x.astype(np.int64) @ w.astype(np.int64).T
    library.int8(on_x, on_w, y)
    np.testing.assert_array_equal(device.to_host(y), want)
    graph = device.capture(lambda: library.int8(on_x, on_w, y))
    y.fill(7)
    graph.replay()
    np.testing.assert_array_equal(device.to_host(y), want)
