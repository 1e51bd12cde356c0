from __future__ import annotations

from l2_dense_parallel.mesh import MeshShape, placement
from l2_dense_parallel.mesh_picture import draw_mesh


def test_two_machines_whose_ranks_alternate() -> None:
    hosts = ["a", "b"] * 4
    found = draw_mesh(MeshShape(tp=2, pp=2, dp=2), placement(hosts), hosts, [range(0, 14), range(14, 28)])
    assert found == "stage 0  layers  0-13   [0 2] [4 6]    on a\nstage 1  layers 14-27   [1 3] [5 7]    on b"


def test_one_stage() -> None:
    assert draw_mesh(MeshShape(tp=1, dp=3), [0, 1, 2], ["", "", ""], [range(0, 4)]) == "stage 0  layers 0-3   [0] [1] [2]"
