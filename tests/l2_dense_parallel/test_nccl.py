"""Collectives on two GPUs, by NCCL and, sharing one GPU, by way of host memory."""

from __future__ import annotations

import pytest

from tests.l2_dense_parallel.launch import on_ranks


@pytest.mark.gpu2
@pytest.mark.mpi
def test_nccl() -> None:
    ended = on_ranks(2, "gpu_sums", "nccl", limit=180.0)
    assert ended.status == 0, ended.err
    assert ended.out.count("right on GPU 0") == 1 and ended.out.count("right on GPU 1") == 1


@pytest.mark.gpu2
@pytest.mark.mpi
@pytest.mark.parametrize("how", ["nccl", "one-shot"])
def test_an_ended_rank(how: str) -> None:
    """Rank 0 waits for its stream, in which an all-reduce waits for a rank that has left."""
    ended = on_ranks(2, "gpu_leave", how, limit=120.0)
    assert ended.status != 0 and ended.seconds < 60.0
    assert ended.errors == ["error: rank 1 has ended while rank 0 waits in the device (tp)"]


@pytest.mark.gpu
@pytest.mark.mpi
def test_sharing_a_gpu() -> None:
    ended = on_ranks(2, "gpu_sums", "share", limit=180.0)
    assert ended.status == 0, ended.err
    assert ended.out.count("right on GPU") == 2


@pytest.mark.gpu2
@pytest.mark.mpi
def test_more_ranks_than_gpus() -> None:
    ended = on_ranks(9, "gpu_refused", limit=180.0)
    assert ended.status != 0 and len(ended.errors) == 1
    assert "9 ranks but" in ended.errors[0] and "--share-gpu" in ended.errors[0]
