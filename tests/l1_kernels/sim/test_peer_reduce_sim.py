from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.gpu_kernels import GpuKernels
from l1_kernels.peer_reduce.gpu import make_sum
from l1_kernels.peer_reduce.launch import PeerReduce
from l1_kernels.peer_reduce.layout import CHUNK, MAX_NUMBERS, MAX_RANKS, MAX_WIDTH, THREADS, Layout, norm_layout, sum_layout, window_words
from l1_kernels.regions import NormArgs
from l1_kernels.sbi_gemm.launch import norm_rows
from l1_kernels.simulator.errors import SimulatorError
from tests.l1_kernels import peer_reduce_checks as checks

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("ranks", "n"), [(2, 1), (2, 7), (2, 37), (2, 4096 + 3), (3, 199), (4, 1024), (8, 5)])
def test_sums(ranks: int, n: int, add: bool) -> None:
    peers = checks.Peers(ranks, np.copy, np.asarray)
    for _ in range(2):
        peers.sums(n, add)
    peers.expect_epochs(6, -(-n // CHUNK), 0, 0)


@pytest.mark.parametrize("n", [3, 199, 1025])
def test_misaligned(n: int) -> None:
    checks.Peers(2, np.copy, np.asarray).sums(n, True, aligned=False)


@pytest.mark.parametrize(("ranks", "kind", "dtype", "num_tokens", "width"), [(2, "layernorm", "fp16", 3, 136), (3, "rmsnorm", "bf16", 1, 264), (2, "rmsnorm", "fp16", 1, 8)])
def test_norms(device: Device, ranks: int, kind: str, dtype: str, num_tokens: int, width: int) -> None:
    peers = checks.Peers(ranks, np.copy, np.asarray)
    peers.norms(device, kind, dtype, num_tokens, width)
    peers.expect_epochs(0, 0, 3, num_tokens)


def test_sums_and_norms_in_turn(device: Device) -> None:
    """They share windows, and no place in them."""
    peers = checks.Peers(2, np.copy, np.asarray)
    peers.sums(1030, True)
    peers.norms(device, "layernorm", "fp16", 2, 72, times=2)
    peers.sums(5, False, times=1)
    peers.norms(device, "layernorm", "fp16", 2, 72, times=1)
    assert (peers.windows[:, 0] == np.array(checks.START, np.int32) + np.array(4, np.int32)).all()  # block 0 took part in both sums


def test_a_peer_that_does_not_come() -> None:
    window = np.zeros((2, sum_layout(2).end), np.int32)
    table = np.array([window[rank].ctypes.data for rank in range(2)])
    x = np.ones(CHUNK, np.float32)
    with pytest.raises(SimulatorError, match="gave up"):
        make_sum(2, False)[1, THREADS](x, x, True, 0, window[0], table, 50)


class Pair:
    """Rank 1 of two, in windows of which rank 0, who is always there first, has written its part."""

    def __init__(self, device: Device, layout: Layout | None = None) -> None:
        self.layout = layout or sum_layout(2)
        self.windows = np.zeros((2, window_words(2)), np.int32)
        table = np.array([self.windows[rank].ctypes.data for rank in range(2)])
        assert isinstance(device.kernels, GpuKernels)
        self.reduce = PeerReduce(device.kernels, 1, self.windows[1], table, most_polls=50)

    def arrive(self, epoch: int, part: np.ndarray) -> None:
        layout, slot = self.layout, epoch % 2
        parts = self.windows[1, layout.parts : layout.end].view(np.float32).reshape(2, 2, -1)
        parts[slot, 0, : part.size] = part.reshape(-1)
        self.windows[1, layout.flags : layout.parts].reshape(2, layout.blocks, MAX_RANKS)[slot, :, 0] = epoch

    def sent(self, epoch: int, size: int) -> np.ndarray:
        return self.windows[0, self.layout.parts : self.layout.end].view(np.float32).reshape(2, 2, -1)[epoch % 2, 1, :size]


@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (2, 1000)])
def test_a_rank_launches(device: Device, shape: tuple[int, int]) -> None:
    rng, pair = np.random.default_rng(3), Pair(device)
    theirs, mine, before = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    x, residual = mine.copy(), before.copy()
    pair.arrive(1, theirs)
    assert pair.reduce.add(x, residual) is residual
    np.testing.assert_array_equal(residual, before + (theirs + mine))
    np.testing.assert_array_equal(x, mine)
    np.testing.assert_array_equal(pair.sent(1, x.size), mine.reshape(-1))
    pair.arrive(2, theirs)
    assert pair.reduce.all_reduce(x) is x
    np.testing.assert_array_equal(x, theirs + mine)
    np.testing.assert_array_equal(pair.sent(2, x.size), mine.reshape(-1))


def test_a_rank_launches_a_norm(device: Device) -> None:
    rng, pair = np.random.default_rng(4), Pair(device, norm_layout(2))
    theirs, mine, before = (rng.standard_normal((2, 40)).astype(np.float32) for _ in range(3))
    gain, shift = rng.standard_normal((2, 40)).astype(np.float32)
    x, residual, norm = mine.copy(), before.copy(), NormArgs("layernorm", gain, shift, 1e-5)
    pair.arrive(1, np.pad(theirs, ((0, 0), (0, MAX_WIDTH - 40))))
    rows = pair.reduce.add_norm(x, residual, norm, "fp16")
    np.testing.assert_array_equal(residual, before + (theirs + mine))
    np.testing.assert_array_equal(pair.sent(1, MAX_WIDTH + 40)[[*range(40), *range(MAX_WIDTH, MAX_WIDTH + 40)]], mine.reshape(-1))
    assert isinstance(device.kernels, GpuKernels)
    np.testing.assert_array_equal(rows, norm_rows(device.kernels, residual, "layernorm", gain, shift, 1e-5, "fp16"))
    for bad in ((2, 36), (17, 40), (1, MAX_WIDTH + 8)):
        x = np.zeros(bad, np.float32)
        assert not pair.reduce.takes_norm(x)
        with pytest.raises(ValueError, match="argument x"):
            pair.reduce.add_norm(x, x.copy(), norm, "fp16")
    with pytest.raises(ValueError, match="argument norm.weight"):
        pair.reduce.add_norm(mine, residual, NormArgs("rmsnorm", gain[:8], None, 1e-5), "fp16")


def test_what_a_rank_refuses(device: Device) -> None:
    reduce = Pair(device).reduce
    with pytest.raises(ValueError, match="argument x"):
        reduce.all_reduce(np.zeros(MAX_NUMBERS + 1, np.float32))
    with pytest.raises(ValueError, match="argument x"):
        reduce.all_reduce(np.zeros(4, np.float64))
    with pytest.raises(ValueError, match="argument residual"):
        reduce.add(np.zeros((2, 4), np.float32), np.zeros(8, np.float32))
