"""All ranks' blocks in one grid of one GPU; over two GPUs: tests/l2_dense_parallel/test_peer_collective.py."""

from __future__ import annotations

from collections.abc import Iterator

import cupy
import pytest

from l1_kernels.device import Device
from l1_kernels.peer_reduce.layout import CHUNK
from tests.l1_kernels import peer_reduce_checks as checks

pytestmark = pytest.mark.gpu
TIMES = 500  # exchanges in a launch


@pytest.fixture(autouse=True)
def default_stream() -> Iterator[None]:
    """Where numba launches by itself."""
    with cupy.cuda.Stream.null:
        yield


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("ranks", "n"), [(2, 1), (2, 37), (2, 4096 + 3), (2, 65_536), (3, 199), (4, 16_384), (8, 5), (8, 8192)])
def test_sums(ranks: int, n: int, add: bool) -> None:
    peers = checks.Peers(ranks, cupy.asarray, cupy.asnumpy)
    for _ in range(2):
        peers.sums(n, add, times=TIMES)
    peers.expect_epochs(2 * TIMES, -(-n // CHUNK), 0, 0)


@pytest.mark.parametrize("n", [3, 199, 1025])
def test_misaligned(n: int) -> None:
    checks.Peers(2, cupy.asarray, cupy.asnumpy).sums(n, True, aligned=False, times=TIMES)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("ranks", "num_tokens", "width"), [(2, 1, 4096), (2, 16, 1600), (3, 5, 8), (4, 4, 8192)])
def test_norms(gpu: Device, kind: str, dtype: str, ranks: int, num_tokens: int, width: int) -> None:
    peers = checks.Peers(ranks, cupy.asarray, cupy.asnumpy)
    peers.norms(gpu, kind, dtype, num_tokens, width, times=20)
    peers.expect_epochs(0, 0, 20, num_tokens)
