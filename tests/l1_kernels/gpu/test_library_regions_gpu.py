"""Fused regions around cuBLAS, against float64, and inside a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.library_regions import LibraryKernels
from l1_kernels.regions import NormArgs
from l1_kernels.weight import host_weight
from tests.l1_kernels import region_checks as checks
from tests.l1_kernels.library_checks import use
from tests.l1_kernels.operation_checks import normal, wide

pytestmark = pytest.mark.gpu
TOKENS = [1, 17, 128, 1031]


@pytest.fixture(autouse=True)
def gemm(monkeypatch: pytest.MonkeyPatch) -> Any:
    from l1_kernels.linear.cublas import Gemm

    library = Gemm()
    use(monkeypatch, library)
    return library


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("kind", "num_out", "size"), [("layernorm", 2304, 768), ("rmsnorm", 199, 40), (None, 37, 37)])
def test_norm_linear(device: Device, dtype: str, num_tokens: int, kind: str | None, num_out: int, size: int) -> None:
    checks.check_norm_linear(device, dtype, num_tokens, num_out, size, kind)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("kind", "gated", "width"), [("gelu", False, 3072), ("silu", True, 199), ("gelu_new", True, 1536), ("relu", False, 7)])
def test_feed_forward(device: Device, dtype: str, num_tokens: int, kind: str, gated: bool, width: int) -> None:
    checks.check_feed_forward(device, dtype, num_tokens, width, 576, kind, gated)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("carried", [False, True])
def test_linear_add(device: Device, dtype: str, num_tokens: int, carried: bool) -> None:
    checks.check_linear_add(device, dtype, num_tokens, 768, 3072, carried)


@pytest.mark.parametrize(("shared_norm", "gated"), [(True, False), (False, True)])
def test_pairs(device: Device, shared_norm: bool, gated: bool) -> None:
    checks.check_norm_pair(device, "fp16", 128, 1200, 3200, 512, shared_norm, gated)
    checks.check_linear_add_pair(device, "fp16", 128, 1031, 1024, 4096, True)


def test_a_replay_gives_what_the_call_gave(gpu: Device, gemm: Any) -> None:
    """The region follows x, which is overwritten in place between replays."""
    regions, rng = FusedRegions(gpu.kernels, 132, gemm=gemm), np.random.default_rng()  # type: ignore[arg-type]
    weight, norm = normal(rng, 199, 64), np.ones(64, np.float32)
    held = gpu.weight(host_weight(weight, "fp16"))
    args, bias = NormArgs("rmsnorm", gpu.to_device(norm), None, 1e-5), gpu.to_device(normal(rng, 199))
    x = gpu.to_device(normal(rng, 37, 64))
    graph = gpu.capture(lambda: regions.norm_linear(x, args, held, bias))
    for _ in range(2):
        x[...] = gpu.to_device(normal(rng, 37, 64))
        want = gpu.to_host(regions.norm_linear(x, args, held, bias))
        np.testing.assert_allclose(gpu.to_host(graph.replay()), want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("num_tokens", [1, 16, 128])
def test_the_baselines_products(num_tokens: int) -> None:
    """open_device(fused=False): cuBLAS for one token too."""
    device = open_device("cuda", fused=False)
    assert isinstance(device.kernels, LibraryKernels)
    rng = np.random.default_rng()
    x, weight = normal(rng, num_tokens, 576), host_weight(normal(rng, 199, 576), "fp16")
    got = device.to_host(device.kernels.linear(device.to_device(x), device.weight(weight)))
    want = wide(x.astype(np.float16)) @ wide(weight.data.view(np.float16)).T
    np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())
