"""All ranks' blocks in one grid of one GPU; over two GPUs: tests/l2_dense_parallel/test_peer_collective.py."""

from __future__ import annotations

import cupy
import pytest

from tests.l1_kernels import peer_reduce_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("ranks", "n"), [(2, 1), (2, 37), (2, 4096 + 3), (2, 65_536), (3, 199), (4, 16_384), (8, 5), (8, 8192)])
def test_sums(ranks: int, n: int, add: bool) -> None:
    checks.check_sums(cupy.asarray, cupy.asnumpy, ranks, n, add, times=500)


@pytest.mark.parametrize("n", [3, 199, 1025])
def test_misaligned(n: int) -> None:
    checks.check_sums(cupy.asarray, cupy.asnumpy, 2, n, True, aligned=False, times=500)
