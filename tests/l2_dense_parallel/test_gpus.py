"""Which rank takes which GPU, as arithmetic on what all ranks see."""

from __future__ import annotations

import pytest

from l1_kernels.errors import UserError
from l2_dense_parallel.gpus import assign, assign_or_refuse


def test_one_rank_a_gpu() -> None:
    assert assign(["a", "a"], [["x", "y"], ["x", "y"]]) == [0, 1]
    assert assign(["a", "b"], [["x"], ["x"]]) == [0, 0]  # equal names on two machines are two GPUs
    assert assign(["a", "a", "a"], [["x", "y"]] * 3) == [0, 1, None]
    assert assign(["a", "a"], [["x"], ["y"]]) == [0, 0]  # the launcher showed each rank its own
    assert assign(["a", "a"], [["x"], ["x"]]) == [0, None]


def test_the_rest_stands_aside() -> None:
    hosts, seen = ["a"] * 4, [["x", "y"]] * 4
    assert assign_or_refuse(1, hosts, seen, asked=False, share_gpu=False) == (
        1, [0, 1], "2 of 4 ranks stand aside: one rank a GPU, 2 here",
    )  # fmt: skip
    assert assign_or_refuse(3, hosts, seen, asked=False, share_gpu=False)[0] == -1
    assert assign_or_refuse(0, hosts, [list("wxyz")] * 4, asked=True, share_gpu=False) == (0, [0, 1, 2, 3], "")


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(UserError, match=r"2 ranks but 1 GPU: .*mpirun -n 1.*--share-gpu"):
        assign_or_refuse(0, ["a", "a"], [["x"], ["x"]], asked=True, share_gpu=False)
    assert assign_or_refuse(1, ["a", "a"], [["x"], ["x"]], asked=True, share_gpu=True) == (0, [0, 1], "")
    assert assign_or_refuse(3, ["a", "b", "a", "a"], [["x", "y"]] * 4, asked=True, share_gpu=True)[0] == 0


def test_no_gpu() -> None:
    with pytest.raises(UserError, match="no usable GPU; use --device cpu"):
        assign_or_refuse(0, ["a", "a"], [[], []], asked=False, share_gpu=False)
    with pytest.raises(UserError, match="no usable GPU on rank 1"):
        assign_or_refuse(0, ["a", "b"], [["x"], []], asked=False, share_gpu=False)
