"""Mesh arithmetic: the paper's example, invariants over many shapes, the rule for defaults, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l1_kernels.errors import UserError
from l2_dense_parallel.mesh import AXES, Mesh, MeshShape, choose_shape, placement, tp_degrees
from l2_dense_parallel.slicing import ExpertShard

FIGURE_4 = MeshShape(tp=4, dp=4, ep=8, es=2)


def test_the_papers_example() -> None:
    assert FIGURE_4.size == 16
    assert FIGURE_4.groups("tp") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert FIGURE_4.groups("dp") == [(i, i + 4, i + 8, i + 12) for i in range(4)]
    assert FIGURE_4.groups("es") == [(i, i + 8) for i in range(8)]  # the slices of one expert
    assert FIGURE_4.groups("ep") == [tuple(range(8)), tuple(range(8, 16))]
    assert choose_shape(16, num_heads=32, num_kv_heads=32, num_experts=8, tp=4) == FIGURE_4


@st.composite
def shapes(draw: st.DrawFn) -> MeshShape:
    tp, pp, dp = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ep = draw(st.sampled_from([0, *(d for d in range(1, tp * dp + 1) if tp * dp % d == 0)]))
    return MeshShape(tp, pp, dp, *((ep, tp * dp // ep) if ep else (1, 1)))


@given(shapes())
def test_groups_partition_the_ranks(shape: MeshShape) -> None:
    for axis in AXES:
        groups = shape.groups(axis)
        assert sorted(position for group in groups for position in group) == list(range(shape.size))
        for group in groups:
            assert len(group) == getattr(shape, axis)
            assert [shape.coordinates(position)[axis] for position in group] == list(range(len(group)))
    for first, second in (("tp", "dp"), ("ep", "es")):
        for a in shape.groups(first):
            for b in shape.groups(second):
                assert len(set(a) & set(b)) <= 1


@given(shapes())
def test_a_meshs_ranks_are_its_shapes(shape: MeshShape) -> None:
    for position in range(shape.size):
        mesh = Mesh(shape, position)
        ranks = {"tp": mesh.tp_rank, "pp": mesh.pp_rank, "dp": mesh.dp_rank, "ep": mesh.ep_rank, "es": mesh.es_rank}
        assert ranks == shape.coordinates(position)
    assert mesh.describe() == {axis: getattr(mesh, axis) for axis in ("tp", "pp", "dp", "ep", "es")}


@given(st.integers(0, 40), st.integers(1, 6))
def test_prompts_are_dealt_out_once(count: int, dp: int) -> None:
    shares = [list(Mesh(MeshShape(dp=dp), position).my_share(count)) for position in range(dp)]
    assert sorted(i for share in shares for i in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shapes_that_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="ep \\* es"):
        MeshShape(tp=4, dp=2, ep=4, es=4)
    with pytest.raises(ValueError, match="tp must be positive"):
        MeshShape(tp=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(12, 12, [1, 2, 3, 4, 6, 12]), (8, 2, [1, 2, 4, 8]), (9, 3, [1, 3, 9]), (12, 4, [1, 2, 4, 12]), (7, 1, [1, 7])],
)
def test_tp_degrees(heads: int, kv_heads: int, expected: list[int]) -> None:
    assert tp_degrees(heads, kv_heads, 64) == expected


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "asked", "tp", "dp"),
    [
        (1, 12, 12, {}, 1, 1),
        (2, 12, 12, {}, 2, 1),
        (4, 4, 2, {}, 4, 1),
        (4, 2, 2, {}, 2, 2),
        (5, 4, 4, {}, 1, 5),
        (16, 12, 12, {}, 4, 4),
        (64, 12, 12, {}, 4, 16),
        (6, 12, 12, {"tp": 2}, 2, 3),
        (2, 12, 12, {"streamed": True}, 1, 2),
        (2, 12, 12, {"streamed": True, "tp": 2}, 2, 1),
    ],
)
def test_default_rule(ranks: int, heads: int, kv_heads: int, asked: dict, tp: int, dp: int) -> None:
    assert choose_shape(ranks, heads, kv_heads, **asked) == MeshShape(tp=tp, dp=dp)


def test_every_launch_has_a_mesh() -> None:
    for ranks in range(1, 40):
        for heads, kv_heads in ((12, 12), (9, 3), (1, 1), (71, 1)):
            assert choose_shape(ranks, heads, kv_heads).size == ranks
            moe = choose_shape(ranks, heads, kv_heads, num_experts=8)
            assert moe.size == ranks == moe.ep * moe.es and 8 % moe.ep == 0


@pytest.mark.parametrize(
    ("ranks", "asked", "words"),
    [
        (3, {"tp": 3}, ["--tp 3", "4 heads and 2 KV heads", "1, 2 or 4", "--pp"]),
        (6, {"tp": 4}, ["--tp 4", "6 ranks", "1 or 2", "mpirun -n"]),
        (2, {"tp": 4}, ["--tp 4", "2 ranks", "start 4 ranks"]),
        (4, {"pp": 3}, ["--pp 3", "4 ranks", "1, 2 or 4"]),
        (8, {"pp": 4, "tp": 4}, ["--tp 4", "2 ranks of a pipeline stage", "start 16 ranks"]),
        (2, {"tp": 0}, ["--tp 0"]),
        (2, {"ep": 2}, ["--ep 2", "no experts"]),
        (4, {"ep": 3, "num_experts": 6}, ["--ep 3", "4 ranks", "6 experts", "1 or 2"]),
    ],
)
def test_a_mesh_that_cannot_be(ranks: int, asked: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        choose_shape(ranks, num_heads=4, num_kv_heads=2, **asked)
    text = str(raised.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_what_a_rank_of_the_papers_example_holds() -> None:
    """Position 13: third of its tensor-parallel group, second slice of what owner 5 of 8 has."""
    shard = Mesh(FIGURE_4, 13).shard
    assert (shard.rank, shard.size) == (1, 4)
    assert shard.of_experts == ExpertShard(ep_rank=5, ep=8, es_rank=1, es=2)
    assert list(shard.of_experts.owned(8)) == [5] and list(shard.of_experts.owned(32)) == [20, 21, 22, 23]
    assert Mesh(MeshShape(tp=2, dp=2), 3).shard.of_experts == ExpertShard(0, 1, 1, 2)  # no experts asked for: slices over tp


def test_the_ranks_of_a_stage() -> None:
    shape = MeshShape(tp=2, pp=2, dp=2, ep=4)
    assert [Mesh(shape, position).stage_members for position in (1, 6)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert Mesh(shape, 4, order=(7, 6, 5, 4, 3, 2, 1, 0)).stage_members == (3, 2, 1, 0)


def test_ranks_of_a_machine_lie_side_by_side() -> None:
    assert placement(["a", "a", "b", "b"]) == [0, 1, 2, 3]
    assert placement(["b", "a", "b", "a"]) == [0, 2, 1, 3]  # dealt out in turn by the launcher
    assert placement(["a", "b", "a", "b"], taking_part=[1, 2, 3]) == [2, 1, 3]
