"""Routing by einsums and routing by tables are the same operation: equal results where nothing is dropped, and the same drops."""

from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.weight import Weight
from l3_moe.einsum_baseline import EinsumRouting, capacity_of
from l3_moe.kernels import open_moe_kernels
from tests.l3_moe import routing_checks as checks


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param)


@pytest.mark.parametrize("factor", [1.25, 0.5, None])
@pytest.mark.parametrize(("softmax_first", "renormalise"), checks.MODES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 3, 1), (7, 8, 2), (37, 8, 1), (37, 12, 3)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_as_the_tables(
    device: Device, dtype: str, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool, factor: float | None
) -> None:
    """With an expert that multiplies its rows by a number of its own. factor None: room for all."""
    rng, width = checks.fresh(), 16
    kernels = open_moe_kernels(device)
    capacity = num_tokens if factor is None else capacity_of(num_tokens, top_k, num_experts, factor)
    gate_numbers = checks.normal(rng, num_experts, width)
    x = checks.clear_choices(rng, gate_numbers, num_tokens, top_k)
    gate, on_device = device.weight(Weight(gate_numbers, "fp32")), device.to_device(x)
    before, factors = checks.normal(rng, num_tokens, width), checks.normal(rng, num_experts)

    tables, rows = kernels.route_rows(on_device, gate, top_k, softmax_first, renormalise, dtype, capacity)
    number = {"fp32": np.float32, "fp16": np.float16}[dtype]
    offsets, rows_host = device.to_host(tables.offsets), device.to_host(rows).view(number)
    y = np.zeros(rows_host.shape, np.float32)
    for e in range(num_experts):
        mine = slice(offsets[e], offsets[e + 1])
        y[mine] = rows_host[mine].astype(np.float32) * factors[e]
    by_tables = device.to_host(kernels.combine(device.to_device(y), tables, device.to_device(before.copy())))

    einsum = EinsumRouting(device, num_experts, top_k, softmax_first, renormalise, dtype, capacity)
    weights, masked = einsum.dispatch(on_device, gate)
    spread = device.to_host(masked).reshape(num_experts, capacity, width)
    for e in range(num_experts):
        count = offsets[e + 1] - offsets[e]
        np.testing.assert_array_equal(spread[e, :count], rows_host[offsets[e] : offsets[e + 1]])
        assert not spread[e, count:].any()
    outputs = (spread.astype(np.float32) * factors[:, None, None]).astype(number).reshape(-1, width)
    residual = device.to_device(before.copy())
    assert einsum.combine(device.to_device(outputs), weights, residual) is residual
    by_einsum = device.to_host(residual)
    bar = (2e-6 if dtype == "fp32" else 3e-3) * (np.abs(y).max() + 1)
    assert np.abs(by_einsum - by_tables).max() <= bar

    kept = (device.to_host(weights) != 0).sum()
    pairs = num_tokens * top_k
    assert kept == offsets[-1] == pairs - device.to_host(tables.dropped)[0] and (factor is not None or kept == pairs)
    if factor == 0.5 and num_tokens > num_experts:
        assert kept < pairs, "half the room drops something"


def test_capacity() -> None:
    assert [capacity_of(*shape, 1.25) for shape in ((8, 1, 128), (1024, 2, 128), (100, 1, 8), (0, 1, 8))] == [1, 20, 16, 1]
