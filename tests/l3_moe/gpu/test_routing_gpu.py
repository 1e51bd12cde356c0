"""The routing kernels on a GPU: the simulator's checks at larger sizes, graphs that are replayed, and blocks that really run at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.weight import Weight
from l3_moe.kernels import open_moe_kernels
from l3_moe.routing import reference
from l3_moe.routing.gpu_launch import GpuMoEKernels
from tests.l3_moe import routing_checks as checks
from tests.l3_moe.routing_checks import Routed

pytestmark = pytest.mark.gpu
SIZES = [  # tokens, experts, top k
    (1, 1, 1), (7, 3, 2), (7, 8, 8), (32, 8, 2), (33, 8, 2), (37, 60, 4), (199, 128, 1), (199, 129, 8), (1024, 128, 2), (4096, 128, 2),
    (4099, 512, 16),
]  # fmt: skip


@pytest.fixture(scope="module")
def gpu() -> Device:
    return open_device("cuda")


@pytest.fixture(params=["default stream", "own stream"])
def on(request: pytest.FixtureRequest, gpu: Device) -> Iterator[Routed]:
    if request.param == "default stream":
        yield Routed(gpu, open_moe_kernels(gpu))
        return
    with gpu.stream():
        yield Routed(gpu, open_moe_kernels(gpu))


@pytest.mark.parametrize(("softmax_first", "renormalise"), checks.MODES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_tables(on: Routed, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool) -> None:
    for capacity in (None, 1, max(1, num_tokens * top_k // num_experts)):
        checks.check_random(on, num_tokens, num_experts, top_k, softmax_first, renormalise, capacity)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_most_tokens(on: Routed, top_k: int) -> None:
    checks.check_random(on, 65536, 64, top_k, True, True, None)


@pytest.mark.parametrize(("num_tokens", "expert"), [(9, 0), (45, 7), (4096, 3)])
def test_all_experts_empty_but_one(on: Routed, num_tokens: int, expert: int) -> None:
    checks.check_crowd(on, num_tokens, 8, expert)


@pytest.mark.parametrize("num_tokens", [7, 37, 1025])
def test_not_finite(on: Routed, num_tokens: int) -> None:
    checks.check_not_finite(on, num_tokens, 12, 4)


@pytest.mark.parametrize("capacity", [None, 2, 100])
@pytest.mark.parametrize("num_tokens", [7, 37, 1025])
def test_given_choice(on: Routed, num_tokens: int, capacity: int | None) -> None:
    checks.check_given_choice(on, num_tokens, 5, 3, capacity)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "capacity"),
    [(1, 3, 1, 1, None), (7, 8, 2, 37, None), (7, 8, 3, 16, 2), (199, 8, 8, 2056, None), (199, 60, 4, 4096, 5), (37, 8, 16 // 2, 12, None)],
)
def test_layout(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, capacity: int | None, dtype: str) -> None:
    checks.check_layout(on, num_tokens, num_experts, top_k, width, dtype, capacity)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "capacity"),
    [
        (1, 8, 2, 32, None), (8, 128, 1, 4096, None), (9, 60, 4, 1056, 2), (64, 128, 2, 4096, None), (199, 130, 2, 2048, None),
        (1024, 128, 2, 4096, 20), (4096, 128, 1, 4096, None), (4099, 60, 4, 2056, None), (5, 70, 2, 24, None),
    ],
)  # fmt: skip
def test_route_rows(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, dtype: str, capacity: int | None) -> None:
    checks.check_route_rows(on, num_tokens, num_experts, top_k, width, dtype, capacity)


@pytest.mark.parametrize("num_tokens", [3, 33, 64, 129, 1000])
def test_the_gate_s_product(gpu: Device, num_tokens: int) -> None:
    """As near to float64 as a float32 product, for numbers small and large."""
    kernels, rng = open_moe_kernels(gpu), checks.fresh()
    x = checks.normal(rng, num_tokens, 4096) * np.float32(10) ** checks.normal(rng, num_tokens, 1)
    gate = checks.normal(rng, 128, 4096) * np.float32(0.02)
    assert isinstance(kernels, GpuMoEKernels)
    parts = kernels.gate_parts(gpu.to_device(x), gpu.weight(Weight(gate, "fp32")))
    got = gpu.to_host(parts).astype(np.float64).sum(axis=0)
    error = np.abs(got - x.astype(np.float64) @ gate.T.astype(np.float64))
    assert (error <= 1e-6 * (np.abs(x.astype(np.float64)) @ np.abs(gate.T.astype(np.float64)))).all()


def test_round_trip(on: Routed) -> None:
    checks.check_round_trip(on, 2049, 128, 2, 1024)


def test_no_tokens(on: Routed) -> None:
    checks.check_no_tokens(on)


def test_bad_arguments_are_named(on: Routed) -> None:
    checks.check_rejections(on)


@pytest.mark.parametrize("num_tokens", [8, 600])
def test_in_a_graph(num_tokens: int) -> None:
    """Tables, dispatch and combine of several layers in one graph, replayed over other numbers each time: the barrier's counter goes on,
    and no launch that begins early misses what the one before has written."""
    device = open_device("cuda")
    kernels, rng = open_moe_kernels(device), checks.fresh()
    num_experts, top_k, width, layers = 16, 2, 512, 6
    zeros = device.weight(Weight(np.zeros((num_experts, width), np.float32), "fp32"))
    logits, x = device.zeros((layers, num_tokens, num_experts)), device.zeros((num_tokens, width))

    def step() -> list[object]:
        kept: list[object] = []
        for layer in range(layers):
            tables = kernels.tables(logits[layer], top_k, True, True)
            rows = kernels.dispatch(x, tables, "fp32")
            out = kernels.combine(rows, tables, None)
            even, again = kernels.route_rows(out, zeros, top_k, True, True, "fp32")  # all logits are equal: experts 0 and 1
            kept += [tables, rows, out, kernels.combine(again, even, None)]
        return kept

    graph = device.capture(step)
    for _ in range(5):
        host_logits, host_x = checks.normal(rng, layers, num_tokens, num_experts), checks.normal(rng, num_tokens, width)
        logits[...], x[...] = device.to_device(host_logits), device.to_device(host_x)
        for _ in range(3):
            kept = graph.replay()
        on = Routed(device, kernels)
        for layer in range(layers):
            tables, rows, out, twice = kept[4 * layer : 4 * layer + 4]
            found = on.tables_down(tables)  # type: ignore[arg-type]
            checks.expect_equal(found, reference.tables(host_logits[layer].astype(np.float64), top_k, True, True))
            np.testing.assert_array_equal(on.down(rows), host_x[found.sources // top_k])
            np.testing.assert_allclose(on.down(out), host_x, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(on.down(twice), host_x, rtol=1e-5, atol=1e-6)
