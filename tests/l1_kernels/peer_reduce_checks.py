"""Sums over peers, all ranks in one grid: blockIdx.y is the rank, so they wait for each other really, on one GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from l1_kernels.cuda_api import cuda
from l1_kernels.peer_reduce.exchange import MAX_POLLS
from l1_kernels.peer_reduce.gpu import make_sum_block
from l1_kernels.peer_reduce.layout import CHUNK, THREADS, Layout, sum_layout

GUARD = 64  # words behind a window that nobody may touch
POISON = 0x7FC0BEEF  # a NaN


@cache
def make_all_ranks(ranks: int, add: bool) -> Callable[..., Any]:
    """Every rank's kernel, `x.shape[1]` times: x, residual [ranks, times, pitch], of which n numbers count."""
    sum_block = make_sum_block(ranks, add)

    @cuda.jit
    def all_ranks(x, residual, n, aligned, windows, table, most_polls):
        me = cuda.blockIdx.y
        for turn in range(x.shape[1]):
            sum_block(x[me, turn][:n], residual[me, turn][:n], aligned, me, cuda.blockIdx.x, windows[me], table, most_polls)
            for _ in range(turn % 2 * me):  # some ranks are late at times
                cuda.nanosleep(100)

    return all_ranks


def new_windows(layout: Layout) -> np.ndarray:
    """int32 [ranks, words]: parts and what lies behind hold poison, epochs and flags zeros, but for the epochs' near end."""
    windows = np.full((layout.ranks, layout.end + GUARD), POISON, np.int32)
    windows[:, layout.first : layout.parts] = 0
    windows[:, layout.first : layout.flags] = 2**31 - 3  # it wraps around in the third exchange
    return windows


def check_sums(to_device: Callable[[np.ndarray], Any], to_host: Callable[[Any], np.ndarray], ranks: int, n: int, add: bool, aligned: bool = True, times: int = 3) -> None:
    """`times` exchanges in one launch, then as many in another, of new numbers."""
    layout = sum_layout(ranks)
    windows = to_device(new_windows(layout))
    table = to_device(np.array([address(windows) + 4 * rank * (layout.end + GUARD) for rank in range(ranks)]))
    rng = np.random.default_rng(n)
    pitch = -(-n // 4) * 4 + 4 if aligned else n + 1
    for _ in range(2):
        parts, before = (rng.standard_normal((ranks, times, pitch)).astype(np.float32) for _ in range(2))
        before[:] = before[:1]  # a residual is the same on every rank
        x, residual = to_device(parts.copy()), to_device(before.copy())
        make_all_ranks(ranks, add)[(-(-n // CHUNK), ranks), THREADS](x, residual, n, aligned, windows, table, MAX_POLLS)
        exact = parts.astype(np.float64).sum(axis=0) + (before[0] if add else 0)
        got, other = (to_host(residual), to_host(x)) if add else (to_host(x), to_host(residual))
        bound = 1e-6 * np.abs(parts).sum(axis=0).max()
        assert np.abs(got[..., :n] - exact[:, :n]).max() <= bound
        for rank in range(ranks):
            np.testing.assert_array_equal(got[rank, ..., :n].view(np.uint32), got[0, ..., :n].view(np.uint32), err_msg=f"rank {rank} has other bits")
        np.testing.assert_array_equal(got[..., n:], (before if add else parts)[..., n:], err_msg="written past the end")
        np.testing.assert_array_equal(other, parts if add else before)
    assert (to_host(windows)[:, layout.end :] == POISON).all(), "written past a window's end"
    used = to_host(windows)[:, layout.first : layout.first + -(-n // CHUNK)]
    assert (used == np.array(2**31 - 3).astype(np.int32) + np.array(2 * times).astype(np.int32)).all()


def address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else int(array.data.ptr)
