"""The GPU's routing kernels in the simulator. Beyond 32 tokens there are several blocks, and a barrier between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from l1_kernels.device import open_device
from l1_kernels.gpu_kernels import GpuKernels
from l1_kernels.weight import encode
from l3_moe.kernels import open_moe_kernels
from l3_moe.routing import product, reference
from l3_moe.routing.gpu_launch import GpuMoEKernels
from tests.l3_moe import routing_checks as checks
from tests.l3_moe.routing_checks import Routed

pytestmark = pytest.mark.sim
SIZES = [(1, 1, 1), (1, 60, 4), (7, 3, 2), (7, 8, 8), (37, 60, 4), (37, 8, 1), (199, 128, 1)]  # tokens, experts, top k


@pytest.fixture(scope="module")
def on() -> Routed:
    device = open_device("sim")
    return Routed(device, open_moe_kernels(device))


@pytest.mark.parametrize(("softmax_first", "renormalise"), checks.MODES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_tables(on: Routed, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool) -> None:
    checks.check_random(on, num_tokens, num_experts, top_k, softmax_first, renormalise, capacity=3 if renormalise else None)


@pytest.mark.parametrize(("num_experts", "top_k"), [(129, 3), (512, 16)])
def test_many_experts(on: Routed, num_experts: int, top_k: int) -> None:
    checks.check_random(on, 37, num_experts, top_k, True, False, 2)


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_any_logits(on: Routed, data: st.DataObject) -> None:
    """Few different values, so that most choices are ties."""
    num_tokens, num_experts = data.draw(st.sampled_from([2, 5, 33, 41]), "tokens"), data.draw(st.integers(1, 9), "experts")
    top_k = data.draw(st.integers(1, min(3, num_experts)), "k")
    capacity = data.draw(st.none() | st.integers(1, 10), "capacity")
    values = st.sampled_from([0.0, -0.0, 1.0, 2.0, -np.inf, np.nan])
    logits = data.draw(arrays.arrays(np.float32, (num_tokens, num_experts), elements=values), "logits")
    checks.check_tables(on, logits, top_k, *data.draw(st.sampled_from(checks.MODES)), capacity)


@pytest.mark.parametrize(("num_tokens", "expert"), [(9, 0), (45, 7)])
def test_all_experts_empty_but_one(on: Routed, num_tokens: int, expert: int) -> None:
    checks.check_crowd(on, num_tokens, 8, expert)


@pytest.mark.parametrize("num_tokens", [7, 37])
def test_not_finite(on: Routed, num_tokens: int) -> None:
    checks.check_not_finite(on, num_tokens, 12, 4)


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("num_tokens", [7, 37])
def test_given_choice(on: Routed, num_tokens: int, capacity: int | None) -> None:
    checks.check_given_choice(on, num_tokens, 5, 3, capacity)


def test_more_pairs_of_an_expert_than_a_warp_ranks_at_once(on: Routed) -> None:
    """A block of 50 tokens and two choices: ranks go on over rounds of 32 pairs."""
    kernels = on.device.kernels
    assert isinstance(kernels, GpuKernels)
    few = Routed(on.device, GpuMoEKernels(kernels, 1, lambda: 0))
    checks.check_random(few, 50, 3, 2, True, True, None)


def test_launches_one_after_the_other(on: Routed) -> None:
    """The barrier's counter goes on, by other numbers of blocks too."""
    for num_tokens in (199, 37, 199, 7, 60):
        checks.check_random(on, num_tokens, 8, 2, True, True, None)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "capacity"),
    [(1, 3, 1, 1, None), (7, 8, 2, 37, None), (7, 8, 3, 16, 2), (3, 4, 1, 12, None), (1, 8, 8, 2056, None)],
)
def test_layout(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, capacity: int | None, dtype: str) -> None:
    checks.check_layout(on, num_tokens, num_experts, top_k, width, dtype, capacity)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "dtype", "capacity"),
    [
        (1, 8, 2, 32, "fp16", None), (7, 60, 4, 96, "bf16", 2), (9, 3, 1, 64, "fp32", None), (40, 130, 2, 32, "fp16", None),
        (5, 70, 2, 24, "fp16", None),
    ],
)  # fmt: skip
def test_route_rows(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, dtype: str, capacity: int | None) -> None:
    checks.check_route_rows(on, num_tokens, num_experts, top_k, width, dtype, capacity)


@pytest.mark.parametrize("count", [1, 5, 12])
def test_rows_of_several_segments(on: Routed, count: int) -> None:
    """The launch behind the product alone: logits in several parts, rows longer than what a warp holds of them at a time."""
    kernels, rng = on.kernels, checks.fresh()
    assert isinstance(kernels, GpuMoEKernels)
    parts, x = checks.normal(rng, count, 13, 72), checks.normal(rng, 13, 1064)
    tables, rows = kernels.route_parts(parts, 70, 2, False, None, x, "fp16")
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    checks.expect_equal(tables, reference.tables(total[:, :70].astype(np.float64), 2, True, True))
    np.testing.assert_array_equal(rows, encode(x, "fp16")[tables.sources // 2])


def test_misaligned(on: Routed) -> None:
    """Rows of 16 bytes at an address that is no multiple of 16."""
    rng = checks.fresh()
    x = np.empty(7 * 16 + 1, np.float32)[1:].reshape(7, 16)
    x[...] = checks.normal(rng, 7, 16)
    tables = on.kernels.tables(checks.normal(rng, 7, 4), 1, True, True)
    rows = on.kernels.dispatch(x, tables, "fp32")
    np.testing.assert_array_equal(rows, x[tables.sources])
    start = x.copy()
    np.testing.assert_array_equal(on.kernels.combine(rows, tables, x), start + start)


@given(st.integers(0, 70000), st.integers(1, 512), st.integers(1, 300), st.sampled_from([4, 108, 132]))
def test_the_gate_s_product_covers_everything(num_tokens: int, num_experts: int, stages: int, multiprocessors: int) -> None:
    size = stages * product.K
    across, (token_tiles, expert_tiles, parts), chunk = product.plan(num_tokens, num_experts, size, multiprocessors)
    assert token_tiles * product.tokens_of(across) >= num_tokens and expert_tiles * product.EXPERTS >= num_experts
    assert chunk % product.K == 0 and parts * chunk >= size and (parts < 4 or parts % 4 == 0)


def test_round_trip(on: Routed) -> None:
    checks.check_round_trip(on, 37, 8, 3, 24)


def test_no_tokens(on: Routed) -> None:
    checks.check_no_tokens(on)


def test_bad_arguments_are_named(on: Routed) -> None:
    checks.check_rejections(on)


def test_limits_are_named(on: Routed) -> None:
    zeros = on.device.zeros
    few = zeros((1, 17), np.int32), zeros((1, 17))
    for name, call in (
        ("logits", lambda: on.kernels.tables(zeros((1, 513)), 1, True, False)),
        ("top_k", lambda: on.kernels.tables(zeros((1, 20)), 17, True, False)),
        ("logits", lambda: on.kernels.tables(zeros((65537, 1)), 1, True, False)),
        ("num_experts", lambda: on.kernels.tables_of(few[0], few[1], 513)),
        ("experts", lambda: on.kernels.tables_of(*few, 20)),
    ):
        with pytest.raises(ValueError, match=rf"argument {name}\b"):
            call()
