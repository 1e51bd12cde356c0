"""Collectives among real ranks, on host memory."""

from __future__ import annotations

import numpy as np
import pytest

from l2_dense_parallel.collectives import NoCollective
from l2_dense_parallel.mesh import Mesh, MeshShape, build_mesh
from l2_dense_parallel.open_collective import open_collective
from l2_dense_parallel.ranks import Launch
from l2_dense_parallel.world import World
from tests.l2_dense_parallel.launch import on_ranks


def test_a_group_of_one() -> None:
    world = World(Launch()).start()
    mesh = build_mesh(world, MeshShape())
    assert mesh == Mesh()
    collective = open_collective(world, mesh, "tp")
    assert isinstance(collective, NoCollective)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert collective.all_reduce(x) is x and collective.all_gather(x) is x
    assert collective.broadcast("a") == "a" and collective.gather(3) == [3]
    assert world.exchange(5) == [5]
    world.agree(None)
    world.check_same_arguments(model="x")
    assert world.finish()


def test_a_mesh_must_fit_the_world() -> None:
    with pytest.raises(ValueError, match="2 ranks, 1 take part"):
        build_mesh(World(Launch()), MeshShape(tp=2))


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives(ranks: int) -> None:
    if ranks == 1:
        ended = on_ranks(1, "no_mpi4py")
        assert ended.status == 0 and "needs no MPI" in ended.out, ended.err
        return
    ended = on_ranks(ranks, "sums")
    assert ended.status == 0, ended.err
    assert ended.out.count("sums right") == ranks and ended.err == ""


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "program", "word"), [(2, "staged", "staged right"), (4, "meshes", "mesh right")])
def test_programs(ranks: int, program: str, word: str) -> None:
    ended = on_ranks(ranks, program)
    assert ended.status == 0, ended.err
    assert ended.out.count(word) == ranks
