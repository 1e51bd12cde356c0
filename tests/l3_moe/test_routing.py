"""The CPU's routing kernels, and the reference itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from l1_kernels.device import open_device
from l3_moe.kernels import open_moe_kernels
from l3_moe.routing import reference
from tests.l3_moe import routing_checks as checks
from tests.l3_moe.routing_checks import Routed

TOKENS = [1, 7, 37, 199]
CHOICES = [(1, 1), (3, 2), (8, 8), (60, 4), (128, 8)]  # experts, top k


@pytest.fixture(scope="module")
def on() -> Routed:
    device = open_device("cpu")
    return Routed(device, open_moe_kernels(device))


def test_the_example_of_the_docstring() -> None:
    """l3_moe/tables.py's four tokens."""
    experts = np.array([[0, 1], [2, 1], [0, 2], [0, 1]], np.int32)
    got = reference.tables_of(experts, np.ones((4, 2)), 3)
    assert got.slots.tolist() == [[0, 3], [6, 4], [1, 7], [2, 5]]
    assert got.sources.tolist() == [0, 4, 6, 1, 3, 7, 2, 5]
    assert got.offsets.tolist() == [0, 3, 6, 8] and got.dropped.tolist() == [0]


def test_capacity_by_hand() -> None:
    experts = np.array([[0, 1], [2, 1], [0, 2], [0, 1]], np.int32)
    got = reference.tables_of(experts, np.ones((4, 2)), 3, capacity=2)
    assert got.slots.tolist() == [[0, 2], [4, 3], [1, 5], [-1, -1]]
    assert got.sources.tolist() == [0, 4, 1, 3, 2, 5, -1, -1]
    assert got.offsets.tolist() == [0, 2, 4, 6] and got.dropped.tolist() == [2]


def test_shares_by_hand() -> None:
    logits = np.log([[0.1, 0.4, 0.4, 0.1]])
    experts, share = reference.choose(logits, 3, softmax_first=True, renormalise=False)
    assert experts.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(share, [[0.4, 0.4, 0.1]], rtol=1e-13)
    for softmax_first in (True, False):  # renormalising undoes the difference
        share = reference.choose(logits, 3, softmax_first, renormalise=softmax_first)[1]
        np.testing.assert_allclose(share, [[4 / 9, 4 / 9, 1 / 9]], rtol=1e-13)


@pytest.mark.parametrize("capacity", [None, 1, 5])
@pytest.mark.parametrize(("softmax_first", "renormalise"), checks.MODES)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("num_experts", "top_k"), CHOICES)
def test_tables(
    on: Routed, num_tokens: int, num_experts: int, top_k: int, softmax_first: bool, renormalise: bool, capacity: int | None
) -> None:
    checks.check_random(on, num_tokens, num_experts, top_k, softmax_first, renormalise, capacity)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_logits(on: Routed, data: st.DataObject) -> None:
    """Few different values, so that most choices are ties."""
    num_tokens, num_experts = data.draw(st.integers(1, 40), "tokens"), data.draw(st.integers(1, 20), "experts")
    top_k = data.draw(st.integers(1, min(8, num_experts)), "k")
    capacity = data.draw(st.none() | st.integers(1, 10), "capacity")
    values = st.sampled_from([0.0, -0.0, 1.0, 2.0, -np.inf, np.nan])
    logits = data.draw(arrays.arrays(np.float32, (num_tokens, num_experts), elements=values), "logits")
    checks.check_tables(on, logits, top_k, *data.draw(st.sampled_from(checks.MODES)), capacity)


@pytest.mark.parametrize("expert", [0, 4, 7])
def test_all_experts_empty_but_one(on: Routed, expert: int) -> None:
    checks.check_crowd(on, 37, 8, expert)


def test_not_finite(on: Routed) -> None:
    checks.check_not_finite(on, 37, 12, 4)


@pytest.mark.parametrize("capacity", [None, 2])
def test_given_choice(on: Routed, capacity: int | None) -> None:
    checks.check_given_choice(on, 37, 5, 3, capacity)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "capacity"), [(1, 3, 1, 1, None), (7, 8, 2, 37, None), (37, 8, 3, 16, 5)]
)
def test_layout(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, capacity: int | None, dtype: str) -> None:
    checks.check_layout(on, num_tokens, num_experts, top_k, width, dtype, capacity)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "width", "capacity"), [(1, 8, 2, 32, None), (37, 60, 4, 64, 3), (7, 3, 3, 12, None)]
)
def test_route_rows(on: Routed, num_tokens: int, num_experts: int, top_k: int, width: int, capacity: int | None) -> None:
    checks.check_route_rows(on, num_tokens, num_experts, top_k, width, "bf16", capacity)


def test_round_trip(on: Routed) -> None:
    checks.check_round_trip(on, 37, 8, 3, 24)


def test_no_tokens(on: Routed) -> None:
    checks.check_no_tokens(on)


def test_bad_arguments_are_named(on: Routed) -> None:
    checks.check_rejections(on)
