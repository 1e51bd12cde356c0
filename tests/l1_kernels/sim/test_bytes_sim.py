"""The bytes that docstrings speak of, counted: what each region's launches read and write (fused_regions.py, decode_region.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from l1_kernels.fused_regions import FusedRegions
from l1_kernels.regions import CacheArgs, NormArgs, RotaryArgs, UnfusedRegions
from l1_kernels.weight import Weight, host_weight
from tests.l1_kernels.operation_checks import fresh, normal
from tests.l1_kernels.sim.counted import CountedKernels, Ledger, counting

pytestmark = pytest.mark.sim
D, N, F = 48, 40, 64


class Layer:
    """Inputs on a ledger, and the same regions fused and not."""

    def __init__(self, ledger: Ledger, num_tokens: int, fused: bool, norm_tokens: int = 16) -> None:
        self.ledger, self.rng, self.num_tokens = ledger, fresh(), num_tokens
        kernels = CountedKernels(ledger)
        self.regions: Any = FusedRegions(kernels, 2, norm_tokens=norm_tokens) if fused else UnfusedRegions(kernels)

    def floats(self, name: str, *shape: int) -> Any:
        return self.ledger.array(name, normal(self.rng, *shape))

    def weight(self, outputs: int, inner: int) -> Weight:
        host = host_weight(normal(self.rng, outputs, inner), "fp16")
        return Weight(self.ledger.array("w", host.data), "fp16")

    def norm(self) -> NormArgs:
        return NormArgs("layernorm", self.floats("gain", D), self.floats("shift", D), 1e-5)

    def norm_linear(self) -> None:
        self.regions.norm_linear(self.floats("x", self.num_tokens, D), self.norm(), self.weight(N, D), self.floats("bias", N))

    def feed_forward(self, gated: bool) -> None:
        weight = self.weight(2 * F if gated else F, D)
        self.regions.norm_feed_forward(self.floats("x", self.num_tokens, D), self.norm(), weight, None, "silu", gated)

    def linear_add(self) -> None:
        x, residual = self.floats("x", self.num_tokens, D), self.floats("y", self.num_tokens, N)
        self.regions.linear_add(x, self.weight(N, D), self.floats("bias", N), residual)


def count(monkeypatch: pytest.MonkeyPatch, run: Callable[[Layer], None], num_tokens: int, fused: bool, norm_tokens: int = 16) -> Ledger:
    with counting(monkeypatch) as ledger:
        run(Layer(ledger, num_tokens, fused, norm_tokens))
    return ledger


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_gemm_reads_each_weight_once(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    found = count(monkeypatch, Layer.linear_add, num_tokens, True)
    assert found.read == {"w": 2 * N * D, "x": 4 * num_tokens * D, "bias": 4 * N, "y": 4 * num_tokens * N}
    assert found.written == {"y": 4 * num_tokens * N}


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_norm_of_its_own_goes_through_memory_in_16_bits(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    found = count(monkeypatch, Layer.norm_linear, num_tokens, True, norm_tokens=0)
    assert found.read == {"w": 2 * N * D, "x": 4 * num_tokens * D, "gain": 4 * D, "shift": 4 * D, "bias": 4 * N, "made 1": 2 * num_tokens * D}
    assert found.written == {"made 1": 2 * num_tokens * D, "made 3": 4 * num_tokens * N}  # 2 stands for what is absent


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_what_no_longer_travels(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """fused_regions.py's list, in numbers of 4 bytes; what a feed-forward hands on in 16 bits is 2 bytes less besides."""
    saved = {
        "norm_linear": (Layer.norm_linear, 4 * 2 * D),
        "feed_forward": (lambda layer: layer.feed_forward(False), 4 * (2 * D + 2 * F) + 2 * F),
        "gated": (lambda layer: layer.feed_forward(True), 4 * (2 * D + 4 * F) + 2 * F),
        "linear_add": (Layer.linear_add, 4 * 2 * N),
    }
    for name, (run, bytes_a_token) in saved.items():
        plain, fused = (count(monkeypatch, run, num_tokens, how) for how in (False, True))
        assert plain.total - fused.total == num_tokens * bytes_a_token, name


@pytest.mark.parametrize("group", [1, 2])
def test_attention_reads_each_key_once(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """decode_region.py's formula: T tokens of L keys, G key heads, d dimensions, 2 bytes a number of the cache."""
    lengths, kv_heads, d, half, places = np.array([5, 1, 12], np.int32), 2, 16, 4, 12
    T, heads = len(lengths), 2 * group
    rng = fresh()
    with counting(monkeypatch) as ledger:
        kernels = CountedKernels(ledger)
        regions = FusedRegions(kernels, 2)
        qkv = ledger.array("qkv", normal(rng, T, heads + 2 * kv_heads, d))
        k, v = (ledger.array(name, normal(rng, T, kv_heads, places, d).astype(np.float16).view(np.uint16)) for name in ("k", "v"))
        rows, positions, ends = (ledger.array(n, x.astype(np.int32)) for n, x in (("rows", np.arange(T)), ("positions", lengths - 1), ("ends", lengths)))
        cos, sin = (ledger.array(name, normal(rng, places, half)) for name in ("cos", "sin"))
        turn = RotaryArgs(cos, sin, ledger.array("index", lengths - 1), False)
        regions.attend(qkv, heads, turn, CacheArgs(k, v, "fp16", rows, positions, ends, distinct=True), 0, d**-0.5, None)
    assert kernels.launches == 1
    old = 2 * kv_heads * d * int((lengths - 1).sum())
    assert ledger.read["k"] == ledger.read["v"] == old
    assert ledger.written["k"] == ledger.written["v"] == 2 * T * kv_heads * d
    assert ledger.read["qkv"] == 4 * T * (heads + 2 * kv_heads) * d
    assert ledger.written["made 1"] == 2 * T * heads * d and ledger.read["cos"] == ledger.read["sin"] == 4 * T * half
