"""The forms over real MPI: the paper's 16 ranks and a smaller copy on 8 (Figure 4), messages counted, the same sums as on the spot."""

from __future__ import annotations

import json
import sys

import pytest

from tests.l2_dense_parallel.launch import environment, mpirun, start


def program(ranks: int, *arguments: object) -> list[dict]:
    command = [*mpirun(), "-n", str(ranks), sys.executable, "-m", "tests.l3_moe.exchange.program", *map(str, arguments)]
    ended = start(command, environment(), 120)
    assert ended.status == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]


def messages(found: dict) -> list[dict]:
    return [{group: {what: count for what, (count, _) in sent.items()} for group, sent in of_rank.items()} for of_rank in found["sent"]]


@pytest.mark.mpi
def test_the_papers_sixteen_ranks() -> None:
    """8 experts, slicing 2, TP 4, DP 4: groups as in Figure 4; flat sends p - 1 = 15 messages a direction, PCC p/L - 1 = 3."""
    groups, *forms = program(16, 4, 8, 8)
    assert groups["groups"]["tp"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups["groups"]["es"] == [[i, i + 8] for i in range(8)]
    sent = {found["form"]: messages(found) for found in forms}
    each_way = {"counts", "rows there", "rows back"}
    for of_rank in sent["flat"]:
        assert of_rank == {"stage": dict.fromkeys(each_way, 15)}
    for of_rank in sent["pcc"]:
        assert of_rank == {"across": dict.fromkeys(each_way, 3)}
    for of_rank in sent["hierarchical"]:
        assert of_rank == {"node": dict.fromkeys(each_way, 3), "across": dict.fromkeys(each_way, 3)}


@pytest.mark.mpi
def test_a_smaller_copy_on_eight_ranks() -> None:
    """4 experts, slicing 2, TP 2, DP 4: as Figure 4 with half of everything but the groups."""
    groups, *forms = program(8, 2, 4, 4)
    assert groups["groups"] == {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "dp": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7]], "es": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }  # fmt: skip
    sent = {found["form"]: messages(found) for found in forms}
    assert all(of_rank["stage"]["rows there"] == 7 for of_rank in sent["flat"])
    assert all(of_rank["across"]["rows there"] == 3 for of_rank in sent["pcc"])
