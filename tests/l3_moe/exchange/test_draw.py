"""The pictures of docs/layer3_exchange.md are what their commands print, and what they say of ranks is what the exchange does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from l3_moe.exchange.draw import draw_costs, draw_steps
from l3_moe.exchange.forms import by_destination
from l3_moe.exchange.pairs import destinations
from l3_moe.exchange.placement import Placement

PAGE = (Path(__file__).parents[3] / "docs" / "layer3_exchange.md").read_text(encoding="utf-8")


def shown(picture: str) -> bool:
    return "\n".join(("    " + line).rstrip() for line in picture.splitlines()) in PAGE


def test_the_page_shows_what_is_printed() -> None:
    assert shown(draw_steps(tp=2, dp=2, ep=4, num_experts=4))
    assert shown(draw_costs(16, 4, 128))
    assert shown(draw_costs(128, 8, 128))


def test_the_answers_of_the_exercises() -> None:
    placement = Placement(tp=4, dp=2, ep=2, es=4, position=0, num_experts=2)
    assert placement.owners(1) == [1, 3, 5, 7]
    experts = np.array([[1]])
    senders = {}
    for rank in range(4):
        at = Placement(4, 2, 2, 4, rank, 2)
        to = destinations(experts, at)[by_destination(experts, at)]
        if len(to):
            senders[rank] = to.tolist()
    assert senders == {1: [1, 5], 3: [3, 7]}


def test_a_slice_is_named() -> None:
    assert "rank  9  slice 1 of experts 1" in draw_steps(4, 4, 8, 8)
