"""Fused regions around a library's product: `HostGemm` stands for it, the kernels before and after it are the GPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.library_regions import LibraryKernels
from l1_kernels.regions import NormArgs, UnfusedRegions
from l1_kernels.weight import host_weight
from tests.l1_kernels import region_checks as checks
from tests.l1_kernels.library_checks import HostGemm, use

pytestmark = pytest.mark.sim
TOKENS = [1, 7, 37]


@pytest.fixture(params=[True, False], ids=["adds the bias", "does not"])
def gemm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Regions with it; it must have been called."""
    library = HostGemm(request.param)
    use(monkeypatch, library)
    yield library
    assert library.calls


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("kind", "size", "with_bias"), [("layernorm", 48, True), ("rmsnorm", 40, False), (None, 37, True)])
def test_norm_linear(device: Device, gemm: Any, dtype: str, num_tokens: int, kind: str | None, size: int, with_bias: bool) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, 19, size, kind, with_bias)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("kind", "gated", "width"), [("gelu", False, 199), ("silu", True, 7), ("gelu_new", True, 300), ("relu", False, 1), ("gelu_new", False, 200), ("silu", True, 136)])
def test_feed_forward(device: Device, gemm: Any, dtype: str, num_tokens: int, kind: str, gated: bool, width: int) -> None:
    checks.check_feed_forward(device, dtype, num_tokens, width, 16, kind, gated)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_linear_add(device: Device, gemm: Any, dtype: str, num_tokens: int, carried: bool, add: bool) -> None:
    checks.check_linear_add(device, dtype, num_tokens, 199, 24, carried, add)


@pytest.mark.parametrize(("shared_norm", "gated"), [(True, False), (False, True), (True, True)])
def test_pairs(device: Device, gemm: Any, shared_norm: bool, gated: bool) -> None:
    checks.check_norm_pair(device, "fp16", 19, 7, 24, 16, shared_norm, gated)
    checks.check_linear_add_pair(device, "fp16", 19, 37, 16, 32, True)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_what_the_library_does_not_take(device: Device, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    library = HostGemm()
    use(monkeypatch, library)
    checks.check_norm_linear(device, dtype, 7, 19, 32, "layernorm")
    checks.check_feed_forward(device, dtype, 7, 16, 32, "gelu", False)
    checks.check_linear_add(device, dtype, 7, 19, 32, dtype == "int8")
    assert library.calls == 0


def test_few_tokens_are_sbi_gemms_and_many_the_librarys(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    library = HostGemm()
    use(monkeypatch, library, most_tokens=16)
    checks.check_norm_linear(device, "fp16", 16, 19, 32, "layernorm")
    assert library.calls == 0
    checks.check_norm_linear(device, "fp16", 17, 19, 32, "layernorm")
    assert library.calls == 1


def test_launches_of_a_layer(device: Device) -> None:
    """The table at the head of library_regions.py, the library's calls included, and the baseline's beside it."""
    rng, dtype = np.random.default_rng(0), "fp16"
    x = device.to_device(rng.standard_normal((19, 16)).astype(np.float32))
    weight = device.weight(host_weight(rng.standard_normal((16, 16)).astype(np.float32), dtype))
    bias = device.to_device(np.ones(16, np.float32))
    norm = NormArgs("layernorm", bias, bias, 1e-5)

    def count(fused: bool, adds_bias: bool = True) -> list[int]:
        library = HostGemm(adds_bias)
        kernels = LibraryKernels(device.empty, gemm=library)
        if fused:
            regions: Any = FusedRegions(kernels, 2, gemm=library)
        else:
            regions = UnfusedRegions(kernels)
        hidden = regions.norm_feed_forward(x, norm, weight, bias, "gelu", False)
        found = []
        for region in (
            lambda: regions.norm_linear(x, norm, weight, bias),
            lambda: regions.norm_feed_forward(x, norm, weight, bias, "gelu", False),
            lambda: regions.linear_add(hidden, weight, bias, x.copy()),
        ):
            before = kernels.launches + library.calls
            region()
            found.append(kernels.launches + library.calls - before)
        return found

    assert count(True) == [2, 3, 1]
    assert count(True, False) == [3, 3, 2]
    assert count(False, False) == [4, 5, 4]


def test_the_device_fuses_when_asked_to() -> None:
    assert not isinstance(open_device("sim", fused=True).regions, UnfusedRegions)
    assert isinstance(open_device("sim").regions, UnfusedRegions)
    with pytest.raises(ValueError, match="gemm"):
        open_device("sim", gemm="cutlass")
