"""Sums over peers, all ranks in one grid: blockIdx.y is the rank, so they wait for each other really, on one GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels.cuda_api import cuda
from l1_kernels.device import Device
from l1_kernels.gpu_kernels import GpuKernels
from l1_kernels.peer_reduce.exchange import MAX_POLLS
from l1_kernels.peer_reduce.gpu import make_sum_block
from l1_kernels.peer_reduce.launch import norm_threads
from l1_kernels.peer_reduce.layout import CHUNK, THREADS, norm_layout, sum_layout, window_words
from l1_kernels.peer_reduce.norm import make_norm_block
from l1_kernels.sbi_gemm.launch import norm_rows
from l1_kernels.weight import CARRIER

GUARD = 64  # words behind a window that nobody may touch
POISON = 0x7FC0BEEF  # a NaN
START = 2**31 - 3  # of the epochs: they wrap around in the third exchange


@cache
def make_all_sums(ranks: int, add: bool) -> Callable[..., Any]:
    """Every rank's kernel, `x.shape[1]` times: x, residual [ranks, times, pitch], of which n numbers count."""
    sum_block = make_sum_block(ranks, add)

    @cuda.jit
    def all_sums(x, residual, n, aligned, windows, table, most_polls):
        me = cuda.blockIdx.y
        for turn in range(x.shape[1]):
            sum_block(x[me, turn][:n], residual[me, turn][:n], aligned, me, cuda.blockIdx.x, windows[me], table, most_polls)
            for _ in range(turn % 2 * me):  # some ranks are late at times
                cuda.nanosleep(100)

    return all_sums


@cache
def make_all_norms(ranks: int, kind: str, dtype: str, threads: int) -> Callable[..., Any]:
    """The same with a norm: x, residual, rows [ranks, times, T, D]."""
    ask, norm_block = make_norm_block(ranks, kind, dtype, threads)

    @cuda.jit(launch_bounds=(threads, 1))  # as the kernel itself: or a block of 1024 threads has more registers than there are
    def all_norms(x, residual, gain, shift, has_shift, eps, rows, windows, table, most_polls):
        me = cuda.blockIdx.y
        held = cuda.local.array(24, types.float32)
        for turn in range(x.shape[1]):
            ask(held, x.shape[3], gain, shift, has_shift)
            norm_block(held, x[me, turn], residual[me, turn], eps, rows[me, turn], me, cuda.blockIdx.x, windows[me], table, most_polls)
            for _ in range(turn % 2 * me):
                cuda.nanosleep(100)

    return all_norms


class Peers:
    """The windows of all ranks: parts and what lies behind hold poison, flags zeros."""

    def __init__(self, ranks: int, to_device: Callable[[np.ndarray], Any], to_host: Callable[[Any], np.ndarray]) -> None:
        self.ranks, self.to_device, self.to_host = ranks, to_device, to_host
        self.words = window_words(ranks)
        windows = np.full((ranks, self.words + GUARD), POISON, np.int32)
        for layout in (sum_layout(ranks), norm_layout(ranks)):
            windows[:, layout.first : layout.flags] = START
            windows[:, layout.flags : layout.parts] = 0
        self.windows = to_device(windows)
        first = self.windows.ctypes.data if isinstance(self.windows, np.ndarray) else int(self.windows.data.ptr)
        self.table = to_device(np.array([first + 4 * rank * (self.words + GUARD) for rank in range(ranks)]))

    def sums(self, n: int, add: bool, aligned: bool = True, times: int = 3) -> None:
        """`times` exchanges of n numbers in one launch."""
        rng = np.random.default_rng(n)
        pitch = -(-n // 4) * 4 + 4 if aligned else n + 1
        parts, before = (rng.standard_normal((self.ranks, times, pitch)).astype(np.float32) for _ in range(2))
        before[:] = before[:1]  # a residual is the same on every rank
        x, residual = self.to_device(parts.copy()), self.to_device(before.copy())
        make_all_sums(self.ranks, add)[(-(-n // CHUNK), self.ranks), THREADS](x, residual, n, aligned, self.windows, self.table, MAX_POLLS)
        exact = parts.astype(np.float64).sum(axis=0) + (before[0] if add else 0)
        got, other = (self.to_host(residual), self.to_host(x)) if add else (self.to_host(x), self.to_host(residual))
        assert np.abs(got[..., :n] - exact[:, :n]).max() <= 1e-6 * np.abs(parts).sum(axis=0).max()
        self.expect_alike(got[..., :n].view(np.uint32))
        np.testing.assert_array_equal(got[..., n:], (before if add else parts)[..., n:], err_msg="written past the end")
        np.testing.assert_array_equal(other, parts if add else before)

    def norms(self, device: Device, kind: str, dtype: str, num_tokens: int, width: int, times: int = 3) -> None:
        """The residual against float64, the rows against those of the norm's own launch: bit by bit."""
        rng = np.random.default_rng(width)
        parts, before = (rng.standard_normal((self.ranks, times, num_tokens, width)).astype(np.float32) for _ in range(2))
        before[:] = before[:1] + 3
        gain, shift = rng.standard_normal((2, width)).astype(np.float32)
        has_shift = kind == "layernorm"
        x, residual, rows = self.to_device(parts.copy()), self.to_device(before.copy()), self.to_device(np.full(parts.shape, 0x7FFF, CARRIER[dtype]))
        vectors = self.to_device(gain), self.to_device(shift)
        threads = norm_threads(width)
        make_all_norms(self.ranks, kind, dtype, threads)[(num_tokens, self.ranks), threads](
            x, residual, *vectors, has_shift, np.float32(1e-5), rows, self.windows, self.table, MAX_POLLS
        )
        got = self.to_host(residual)
        assert np.abs(got - (before[0] + parts.astype(np.float64).sum(axis=0))).max() <= 1e-6 * (np.abs(parts).sum(axis=0) + np.abs(before[0])).max()
        self.expect_alike(got.view(np.uint32))
        self.expect_alike(self.to_host(rows))
        np.testing.assert_array_equal(self.to_host(x), parts)
        assert isinstance(device.kernels, GpuKernels)
        for turn in range(times):
            alone = norm_rows(device.kernels, device.to_device(got[0, turn]), kind, vectors[0], vectors[1] if has_shift else None, 1e-5, dtype)
            np.testing.assert_array_equal(self.to_host(rows)[0, turn], self.to_host(alone))

    def expect_alike(self, got: np.ndarray) -> None:
        for rank in range(self.ranks):
            np.testing.assert_array_equal(got[rank], got[0], err_msg=f"rank {rank} has other bits")

    def expect_epochs(self, sums: int, blocks: int, norms: int, tokens: int) -> None:
        """Exchanges so far, and nothing written behind the windows."""
        windows = self.to_host(self.windows)
        assert (windows[:, self.words :] == POISON).all(), "written past a window's end"
        for layout, times, used in ((sum_layout(self.ranks), sums, blocks), (norm_layout(self.ranks), norms, tokens)):
            epochs = np.full(layout.blocks, START, np.int32)
            epochs[:used] += np.array(times, np.int32)
            np.testing.assert_array_equal(windows[:, layout.first : layout.flags], np.tile(epochs, (self.ranks, 1)))
