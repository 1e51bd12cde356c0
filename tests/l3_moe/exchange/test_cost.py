"""The model is of what the forms really send: its messages and bytes are the counters' of test_forms.py, and its formulas the paper's."""

from __future__ import annotations

import pytest

from l3_moe.exchange.cost import FORMS, Way, alltoall_seconds, exchange, fit, one_way
from tests.l3_moe.exchange.test_forms import SIZE, Case, run

ROW = 4 * SIZE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tp", "dp", "ep", "node"), [(4, 4, 8, 4), (2, 4, 8, 2), (1, 4, 4, 2)])
def test_the_model_counts_what_is_sent(form: str, tp: int, dp: int, ep: int, node: int) -> None:
    """Every expert chosen, so rows are even over all ranks."""
    tokens = 4 * tp
    case = Case(tp, dp, ep, experts=ep, tokens=(tokens,) * dp, top_k=ep, node=node)
    _, _, counters = run(case, form)
    size = tokens * ep * (tp * dp // ep) / tp * ROW
    group = node if form == "hierarchical" else tp
    want = exchange(form, tp * dp, group, size)
    for of_rank in counters:
        messages = sum(found.messages.total() for found in of_rank.values())
        sent = sum(found.bytes.total() for found in of_rank.values())
        assert (messages, sent) == (want.messages, pytest.approx(want.bytes))


def test_the_papers_formulas() -> None:
    """128 GPUs in tensor-parallel groups of 8: 128 C1 + C2 becomes 16 C1 + C2 + O(8), where a rank's own part, which is not sent, is taken off."""
    assert one_way("flat", 128, 8, 1.0).messages == 127
    assert one_way("pcc", 128, 8, 1.0).messages == 15
    assert one_way("gathering", 128, 8, 1.0).messages == 15 + 7
    assert one_way("hierarchical", 128, 8, 1.0).messages == 15 + 7
    assert alltoall_seconds("flat", 128, 8, 128e3, 1e-5, 1e-9) == pytest.approx(127e-5 + 127e-6)
    assert alltoall_seconds("pcc", 128, 8, 128e3, 1e-5, 1e-9) == pytest.approx(15e-5 + 120e-6)


def test_one_group_has_nothing_to_send() -> None:
    assert exchange("pcc", 4, 4, 1e6) == Way(0, 0.0)


def test_alpha_and_beta_are_found_again() -> None:
    ways = [one_way(form, 8, 2, size) for form in ("flat", "pcc", "hierarchical") for size in (64.0, 1e4, 1e6)]
    alpha, beta = fit(ways, [way.seconds(2e-6, 1e-10) for way in ways])
    assert (alpha, beta) == (pytest.approx(2e-6), pytest.approx(1e-10))
    assert fit([Way(1, 100.0), Way(1, 200.0)], [1.0, 1.0])[0] == pytest.approx(1.0)  # no negative bandwidth


def test_groups_must_divide() -> None:
    with pytest.raises(ValueError, match="groups of 3"):
        one_way("pcc", 16, 3, 1.0)
