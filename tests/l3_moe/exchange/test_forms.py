"""Every form of the exchange, as a whole stage of ranks: what comes back is the sum over the chosen experts, and as many messages were sent as the paper says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3_moe.exchange.placement import Placement
from tests.l3_moe.exchange.threads import Mail, make_exchange, on_threads

FORMS = ("flat", "hierarchical", "pcc", "gathering", "four steps")
SIZE = 5  # D


@dataclass
class Case:
    """tokens[g]: of data-parallel group g."""

    tp: int
    dp: int
    ep: int
    experts: int
    tokens: tuple[int, ...]
    top_k: int
    seed: int = 0
    node: int = 1
    chosen: list[np.ndarray] = field(default_factory=list)

    def placement(self, position: int) -> Placement:
        return Placement(self.tp, self.dp, self.ep, self.tp * self.dp // self.ep, position, self.experts)


def choice(case: Case, rng: Any) -> list[np.ndarray]:
    """experts [T, k] of each group, distinct within a token."""
    return [np.array([rng.permutation(case.experts)[: case.top_k] for _ in range(count)], np.int32).reshape(count, case.top_k) for count in case.tokens]


def expert_matrices(case: Case, rng: Any) -> np.ndarray:
    """[E, es, D, D]: the slices of an expert add up to it. Whole numbers, so that float32 sums are exact in any order."""
    return rng.integers(-3, 4, (case.experts, case.placement(0).es, SIZE, SIZE)).astype(np.float32)


def run(case: Case, form: str) -> tuple[list[np.ndarray], list[np.ndarray], list[dict]]:
    """What each group gets (the sum of its ranks' parts), what it should get, and each rank's counters."""
    rng = np.random.default_rng(case.seed)
    chosen = case.chosen or choice(case, rng)
    matrices = expert_matrices(case, rng)
    tokens = [rng.integers(-3, 4, (count, SIZE)).astype(np.float32) for count in case.tokens]
    shares = [rng.integers(1, 4, of.shape).astype(np.float32) for of in chosen]
    mail = Mail()

    def rank(position: int) -> tuple[np.ndarray, dict]:
        placement = case.placement(position)
        exchange = make_exchange(form, placement, mail, case.node)
        mine = placement.dp_rank
        trip = exchange.dispatch(tokens[mine], chosen[mine])
        assert trip.offsets[0] == 0 and trip.offsets[-1] == len(trip.rows)
        y = np.full(trip.rows.shape, np.nan, np.float32)
        for local, (first, last) in enumerate(zip(trip.offsets, trip.offsets[1:], strict=False)):
            y[first:last] = trip.rows[first:last] @ matrices[placement.first_expert + local, position // case.ep]
        return exchange.collect(trip, y, shares[mine]), exchange.counters()

    done = on_threads(case.tp * case.dp, rank)
    got = [sum(done[group * case.tp + i][0] for i in range(case.tp)) for group in range(case.dp)]
    whole = matrices.sum(1)
    want = []
    for x, of, share in zip(tokens, chosen, shares, strict=True):
        made = np.einsum("td,tkde->tke", x, whole[of]) if len(x) else np.zeros((0, case.top_k, SIZE))
        want.append((made * share[..., None]).sum(1))
    return got, want, [counters for _, counters in done]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    ranks = tp * dp
    ep = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    experts = ep * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(3, experts)))
    tokens = tuple(draw(st.integers(0, 6)) for _ in range(dp))
    return Case(tp, dp, ep, experts, tokens, top_k, draw(st.integers(0, 99)), draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])))


@given(cases(), st.sampled_from(FORMS))
@settings(deadline=None, max_examples=120)
def test_the_sum_over_the_chosen_experts_comes_back(case: Case, form: str) -> None:
    got, want, _ = run(case, form)
    for found, right in zip(got, want, strict=True):
        assert np.array_equal(found, right)


@pytest.mark.parametrize("form", FORMS)
def test_one_token_in_all_the_stage(form: str) -> None:
    got, want, _ = run(Case(tp=2, dp=3, ep=6, experts=6, tokens=(0, 1, 0), top_k=2, node=2), form)
    assert np.array_equal(got[1], want[1]) and np.abs(want[1]).max() > 0
    assert got[0].shape == (0, SIZE)


@pytest.mark.parametrize("form", FORMS)
def test_all_experts_empty_but_one(form: str) -> None:
    case = Case(tp=2, dp=2, ep=2, experts=4, tokens=(5, 3), top_k=1, node=2)
    case.chosen = [np.full((count, 1), 3, np.int32) for count in case.tokens]
    got, want, counters = run(case, form)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_dropped_choice_goes_nowhere() -> None:
    case = Case(tp=2, dp=2, ep=4, experts=4, tokens=(2, 2), top_k=2, node=2)
    whole = choice(case, np.random.default_rng(1))
    holes = [np.where(np.arange(2) == 1, -1, of) for of in whole]
    for form in FORMS:
        case.chosen = holes
        got, _, _ = run(case, form)
        case.chosen, case.top_k = whole, 2
        everything, _, _ = run(case, form)
        assert not np.array_equal(got[0], everything[0])


# What each rank sends at p = 16, L = 4 where everybody has rows for everybody: messages by group and what they carry.
P16_MESSAGES = {
    "flat": {"stage": {"counts": 15, "rows there": 15, "rows back": 15}},
    "hierarchical": {"node": {"counts": 3, "rows there": 3, "rows back": 3}, "across": {"counts": 3, "rows there": 3, "rows back": 3}},
    "pcc": {"across": {"counts": 3, "rows there": 3, "rows back": 3}},
    "gathering": {"across": {"counts": 3, "rows there": 3, "rows back": 3}, "tp": {"gather": 3}},
    "four steps": {"tp": {"counts": 3, "rows there": 3, "rows back": 3, "gather": 3}, "across": {"counts": 3, "rows there": 3, "rows back": 3}},
}


@pytest.mark.parametrize("form", FORMS)
def test_messages_of_sixteen_ranks(form: str) -> None:
    """The paper's 16 GPUs, TP 4, DP 4, EP 8, slicing 2: flat sends p - 1 = 15 a direction, PCC p/L - 1 = 3, and L - 1 = 3 where it gathers."""
    case = Case(tp=4, dp=4, ep=8, experts=8, tokens=(32, 32, 32, 32), top_k=8, node=4)  # k = E: rows for everybody
    got, want, counters = run(case, form)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    for of_rank in counters:
        assert {group: dict(found.messages) for group, found in of_rank.items()} == P16_MESSAGES[form]


@pytest.mark.parametrize("form", FORMS)
def test_bytes_of_sixteen_ranks(form: str) -> None:
    """T tokens a group, every expert chosen: a group's T k es rows, of which a rank sends its quarter but for its own part. Flat keeps 1/p of what
    it sends to itself, PCC 1/(p/L); hierarchical sends each row twice, less what stays."""
    tokens, row = 32, 4 * SIZE
    case = Case(tp=4, dp=4, ep=8, experts=8, tokens=(tokens,) * 4, top_k=8, node=4)
    _, _, counters = run(case, form)
    rows = tokens * 8 * 2 // 4  # k = 8 experts of es = 2 slices, over L = 4 ranks
    once = {"flat": rows * 15 // 16, "pcc": rows * 3 // 4, "gathering": rows * 3 // 4, "hierarchical": 2 * rows * 3 // 4, "four steps": 2 * rows * 3 // 4}
    gathered = {"gathering": rows * 3, "four steps": tokens // 4 * 3}  # to each of the 3 others: all its rows, or its finished tokens
    for of_rank in counters:
        for way in ("rows there", "rows back"):
            assert sum(found.bytes[way] for found in of_rank.values()) == once[form] * row
        assert sum(found.bytes["gather"] for found in of_rank.values()) == gathered.get(form, 0) * row
