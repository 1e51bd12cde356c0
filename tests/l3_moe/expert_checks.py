"""The experts' kernels and the gate of few tokens against float64, for the simulator and the GPU: fresh numbers, poisoned outputs."""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.regions import NormArgs
from l1_kernels.routing.reference import route
from l1_kernels.sbi_gemm.job import CARRIED
from l1_kernels.weight import Weight, decode, encode, host_weight
from l3_moe.combine_norm import combine_norm
from l3_moe.experts import LoopExperts
from l3_moe.few_tokens import FewTokens
from l3_moe.gate import Routes, gate_few
from l3_moe.sbi_experts import SbiExperts
from layers.config import ModelConfig, MoEConfig
from layers.weights import Linear, MoEWeights
from tests.l1_kernels.operation_checks import fresh, normal, poisoned, wide
from tests.l1_kernels.region_checks import ROUNDING, feed_forward_reference


def config_of(num_experts: int, top_k: int, size: int, width: int, kind: str, gated: bool) -> ModelConfig:
    moe = MoEConfig((0,), num_experts, top_k, width)
    return ModelConfig("test", 10, size, 1, 1, 1, 8, width, 32, activation=kind, gated_ffn=gated, moe=moe)


class Stacks:
    """Random experts on the device, and their numbers in float64."""

    def __init__(self, device: Device, dtype: str, num_experts: int, size: int, width: int, gated: bool, with_bias: bool) -> None:
        self.rng, self.device, self.dtype = fresh(), device, dtype
        self.up, self.up_bias, up = self._stack((num_experts, 2 * width if gated else width, size), with_bias)
        self.down, self.down_bias, down = self._stack((num_experts, size, width), with_bias)
        gate = Weight(device.to_device(normal(self.rng, num_experts, size)), "fp32")
        self.weights = MoEWeights(gate, up, down, None, None, None)

    def _stack(self, shape: tuple[int, ...], with_bias: bool) -> tuple[np.ndarray, np.ndarray, Linear]:
        host = host_weight(normal(self.rng, *shape) / np.float32(np.sqrt(shape[2])), self.dtype)
        bias = normal(self.rng, *shape[:2]) if with_bias else np.zeros(shape[:2], np.float32)
        on_device = self.device.to_device(bias) if with_bias else None
        return wide(decode(host.data, host.dtype, host.scale)), wide(bias), Linear(self.device.weight(host), on_device)

    def rows(self, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Random rows in the carrier that the experts read, and as float64."""
        carried = encode(normal(self.rng, count, size), CARRIED[self.dtype])
        return carried, wide(decode(carried, CARRIED[self.dtype]))

    def expert(self, x: np.ndarray, e: int, kind: str, gated: bool) -> tuple[np.ndarray, np.ndarray]:
        """x [n, D] -> what expert e makes of it, and how large an error may be in units of the rounding."""
        hidden, magnitude = feed_forward_reference(x, self.up[e], self.up_bias[e], kind, gated)
        down = np.abs(self.down[e]).T
        return hidden @ self.down[e].T + self.down_bias[e], (2 * magnitude + np.abs(hidden)) @ down + np.abs(hidden) @ down


def check_experts(
    device: Device, dtype: str, kind: str, gated: bool, num_experts: int, top_k: int, num_tokens: int, size: int, width: int,
    with_bias: bool = True, way: str = "pairs",
) -> None:  # fmt: skip
    """way: "pairs", each by itself; "active", by expert; "rows": dispatched rows of unequal experts, one of them perhaps with all."""
    stacks = Stacks(device, dtype, num_experts, size, width, gated, with_bias)
    config = config_of(num_experts, top_k, size, width, kind, gated)
    experts = SbiExperts(config, FusedRegions(device.kernels, 2), LoopExperts(config, device))  # type: ignore[arg-type]
    if way == "rows":
        counts = stacks.rng.multinomial(num_tokens * top_k, stacks.rng.dirichlet(np.full(num_experts, 0.3)))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        of_row = np.repeat(np.arange(num_experts), counts)
        held, x = stacks.rows(num_tokens * top_k, size)
        got = poisoned(device, experts, device.to_device(held), stacks.weights, device.to_device(offsets))
    else:
        chosen = np.stack([stacks.rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
        of_row = chosen.reshape(-1)
        held, x = stacks.rows(num_tokens, size)
        x = np.repeat(x, top_k, axis=0)
        if way == "pairs":
            got = poisoned(device, experts.pairs, device.to_device(held), stacks.weights, device.to_device(chosen))
        else:
            slots, routes = routes_of(chosen, num_experts)
            tables = Routes(device.to_device(slots), device.to_device(routes), min(num_experts, chosen.size))
            got = poisoned(device, experts.active, device.to_device(held), stacks.weights, tables)
            order = np.argsort(slots.reshape(-1))
            of_row, x = of_row[order], x[order]
    device.synchronize()
    host = device.to_host(got)
    assert host.dtype == np.float32 and host.shape == (num_tokens * top_k, size)
    for e in range(num_experts):
        mine = of_row == e
        want, magnitude = stacks.expert(x[mine], e, kind, gated)
        bar = 2 * ROUNDING[dtype] * magnitude + 1e-5
        error = np.abs(host[mine] - want)
        assert (error <= bar).all(), f"expert {e}: off by {(error / bar).max():.3g} times the bar"  # a NaN fails too


def routes_of(chosen: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """(slots, routes) of l3_moe/gate.py's Routes, the plain way."""
    pairs = chosen.reshape(-1)
    sources = np.argsort(pairs, kind="stable").astype(np.int32)
    slots = np.empty(len(pairs), np.int32)
    slots[sources] = np.arange(len(pairs))
    counts = np.bincount(pairs, minlength=num_experts)
    active, places = np.flatnonzero(counts), min(num_experts, len(pairs))
    ends = np.cumsum(counts[active])
    routes = np.full(2 * places + 1 + len(pairs), -1, np.int32)
    routes[: len(active)] = active
    routes[places : places + len(active) + 1] = [0, *ends]
    routes[2 * places + 1 :] = sources
    return slots.reshape(chosen.shape), routes


def check_gate(device: Device, dtype: str, kind: str, num_tokens: int, num_experts: int, top_k: int, size: int, over_all: bool, equal: bool = False) -> None:
    """equal: some gate rows are the same, so that there are ties."""
    rng = fresh()
    x, gain = normal(rng, num_tokens, size) * 3 + 1, normal(rng, size) * np.float32(0.1) + 1
    shift = normal(rng, size) if kind == "layernorm" else None
    gate = normal(rng, num_experts, size) / np.float32(np.sqrt(size))
    if equal:
        gate[num_experts // 2 :] = gate[: num_experts - num_experts // 2]
    norm = NormArgs(kind, device.to_device(gain), None if shift is None else device.to_device(shift), 1e-5)
    weight = Weight(device.to_device(gate), "fp32")
    rows, experts, share, tables = poisoned(device, gate_few, device.kernels, device.to_device(x), norm, weight, top_k, over_all, dtype)
    device.synchronize()
    centred = wide(x) - (wide(x).mean(1, keepdims=True) if kind == "layernorm" else 0)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * gain + (0 if shift is None else shift)
    error = np.abs(decode(device.to_host(rows), dtype) - normed)
    assert (error <= ROUNDING[dtype] * np.abs(normed) + 2e-5).all()
    logits = normed @ wide(gate).T
    found, got = device.to_host(experts), device.to_host(share)
    want, parts = route(logits, top_k, over_all, False)
    chosen, best = np.take_along_axis(logits, found.astype(np.int64), 1), np.take_along_axis(logits, want.astype(np.int64), 1)
    assert np.abs(chosen - best).max() <= 1e-4  # another expert only where float32 cannot tell them apart
    if equal:
        twins = num_experts - num_experts // 2
        for row in found:  # of twins the lower comes first
            places = {int(e): i for i, e in enumerate(row)}
            assert all(e - num_experts // 2 in places and places[e - num_experts // 2] < i for e, i in places.items() if e >= num_experts // 2 and e - num_experts // 2 < twins)
    assert np.abs(got - parts).max() <= 1e-4
    if num_tokens == 1:
        return  # its pairs are its rows
    slots, routes = routes_of(found, num_experts)
    places = min(num_experts, found.size)
    used = np.r_[np.arange(places), places + np.arange(np.unique(found).size + 1), np.arange(2 * places + 1, len(routes))]  # not the starts of nobody
    np.testing.assert_array_equal(device.to_host(tables.slots), slots)
    np.testing.assert_array_equal(device.to_host(tables.routes)[used], routes[used])
    counts = device.kernels.zero_counts()  # type: ignore[attr-defined]
    assert not device.to_host(counts).any()


def check_few_tokens(device: Device, dtype: str, num_tokens: int) -> None:
    """Gate and experts together: y of each pair is its expert's, of the rows that the gate made."""
    num_experts, top_k, size, width = 4, 2, 48, 16
    stacks = Stacks(device, dtype, num_experts, size, width, True, False)
    config = config_of(num_experts, top_k, size, width, "silu", True)
    few = FewTokens(config, SbiExperts(config, FusedRegions(device.kernels, 2), LoopExperts(config, device)))  # type: ignore[arg-type]
    x, norm = normal(stacks.rng, num_tokens, size), NormArgs("rmsnorm", device.to_device(np.ones(size, np.float32)), None, 1e-5)
    assert few.takes(num_tokens, stacks.weights)
    rows, tables, y = poisoned(device, few, device.to_device(x), norm, stacks.weights)
    device.synchronize()
    normed, host = wide(decode(device.to_host(rows), CARRIED[dtype])), device.to_host(y)
    chosen, slots = device.to_host(tables.experts), device.to_host(tables.slots)
    for t in range(num_tokens):
        for j in range(top_k):
            want, magnitude = stacks.expert(normed[t : t + 1], int(chosen[t, j]), "silu", True)
            assert (np.abs(host[slots[t, j]] - want[0]) <= 2 * ROUNDING[dtype] * magnitude[0] + 1e-5).all()


def check_combine_norm(device: Device, kind: str, dtype: str, num_tokens: int, top_k: int, size: int) -> None:
    rng = fresh()
    y, before = normal(rng, num_tokens * top_k, size) * 3, normal(rng, num_tokens, size)
    slots = rng.permutation(num_tokens * top_k).astype(np.int32).reshape(num_tokens, top_k)
    share, gain = rng.random((num_tokens, top_k), np.float32), normal(rng, size) * np.float32(0.1) + 1
    shift = normal(rng, size) if kind == "layernorm" else None
    norm = NormArgs(kind, device.to_device(gain), None if shift is None else device.to_device(shift), 1e-5)
    residual = device.to_device(before.copy())
    rows = poisoned(device, combine_norm, device.kernels, device.to_device(y), device.to_device(slots), device.to_device(share), residual, norm, dtype)
    device.synchronize()
    want = wide(before) + np.einsum("tj,tjd->td", wide(share), wide(y)[slots])
    assert np.abs(device.to_host(residual) - want).max() <= 1e-5 * np.abs(want).max()
    centred = want - (want.mean(1, keepdims=True) if kind == "layernorm" else 0)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * gain + (0 if shift is None else shift)
    error = np.abs(decode(device.to_host(rows), dtype) - normed)
    assert (error <= ROUNDING[dtype] * np.abs(normed) + 5e-5).all()
