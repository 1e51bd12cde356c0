"""PCC's four steps with the ranks that take them, and what every form sends: `python -m l3_moe.exchange.draw --tp 2 --dp 2 --ep 4 --experts 4`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from l3_moe.exchange.cost import FORMS, exchange, one_way
from l3_moe.exchange.placement import Placement


def draw_steps(tp: int, dp: int, ep: int, num_experts: int) -> str:
    """A line a rank for each step that does something, there and back."""
    ranks = [Placement(tp, dp, ep, tp * dp // ep, position, num_experts) for position in range(tp * dp)]
    lines = [f"p = {tp * dp} ranks, L = tp = {tp}, dp = {dp}, ep = {ep}, es = {tp * dp // ep}, {num_experts} experts"]
    lines += [f"  group {g}: ranks {_list(ranks[g * tp].tp_group())} have the same tokens" for g in range(dp)]
    lines += ["", "there", "  1 transform and split: a rank keeps, of its group's (token, expert) pairs, those for ranks with its own tp_rank; sorted by rank, then expert"]
    lines += [f"      rank {rank.position:2}  " + ", ".join(f"rank {to}: {_experts(ranks[to])}" for to in rank.across()) for rank in ranks]
    lines += [f"  2 all-to-all across groups: {dp - 1} messages a rank"]
    lines += [f"      ranks {_list(ranks[t].across())}" for t in range(tp)]
    lines += ["  3 all-gather: nothing, each slice of an expert has its rows", "  4 transform: rows of all sources, expert by expert", ""]
    lines += ["experts", *(f"      rank {rank.position:2}  {_experts(rank)}" for rank in ranks), ""]
    lines += ["back", "  1 transform: rows by source again", f"  2 all-to-all across groups, as before: {dp - 1} messages a rank"]
    lines += [f"  3 the sum over each group, {_list(ranks[0].tp_group())} ..., which the block makes anyway (the paper: an all-gather, {tp - 1} messages a rank)"]
    lines += ["  4 transform: a token's rows, times their shares, added up: done before 3, so that 3 sends a row a token"]
    return "\n".join(lines)


def draw_costs(ranks: int, group: int, rows: int) -> str:
    """rows: that a rank has for all ranks together, one way."""
    lines = [f"p = {ranks}, groups of {group}, {rows} rows a rank: messages and rows that a rank sends"]
    lines.append(f"  {'form':>13} {'there':>14} {'back':>14} {'with counts':>12}")
    for form in FORMS:
        there = one_way("pcc" if form == "gathering" else form, ranks, group, float(rows))
        back = one_way(form, ranks, group, float(rows))
        both = exchange(form, ranks, group, float(rows))
        lines.append(f"  {form:>13} {there.messages:5} {there.bytes:8.1f} {back.messages:5} {back.bytes:8.1f} {both.messages:12}")
    return "\n".join(lines)


def _experts(rank: Placement) -> str:
    owned = _list(range(rank.first_expert, rank.first_expert + rank.owned))
    return f"experts {owned}" if rank.es == 1 else f"slice {rank.position // rank.ep} of experts {owned}"


def _list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0], prog="python -m l3_moe.exchange.draw")
    for name, default in (("tp", 2), ("dp", 2), ("ep", 4), ("experts", 4), ("rows", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(draw_steps(options.tp, options.dp, options.ep, options.experts))
    print()
    print(draw_costs(options.tp * options.dp, options.tp, options.rows))


if __name__ == "__main__":
    main()
