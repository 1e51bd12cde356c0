"""One rank's part in sums over its peers: which kernel, for which array."""

from __future__ import annotations

import numpy as np

from l1_kernels import checks
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.peer_reduce.exchange import MAX_POLLS
from l1_kernels.peer_reduce.gpu import make_sum
from l1_kernels.peer_reduce.layout import CHUNK, MAX_NUMBERS, THREADS, sum_layout
from l1_kernels.weight import Array

MAX_BYTES = 4 * MAX_NUMBERS


def window_words(ranks: int) -> int:
    """Words of 4 bytes of a rank's window; zeros before the first sum."""
    return sum_layout(ranks).end


class PeerReduce:
    """Every rank makes the same calls in the same order, each rank's on streams that wait for each other: a launch must see the one before it done.

    window      this rank's, int32 [window_words]
    windows     int64 [ranks] on the device: the address, for this rank, of each rank's window; its own too
    most_polls  looks at a flag before the kernel gives up, which ends the GPU's context; a test's or a trial's may be fewer
    """

    def __init__(self, kernels: GpuKernels, rank: int, window: Array, windows: Array, most_polls: int = MAX_POLLS) -> None:
        ranks = windows.shape[0]
        checks.array(window, "window", INT32, (window_words(ranks),))
        checks.array(windows, "windows", np.dtype(np.int64), (ranks,))
        self.kernels = kernels
        self.rank, self.ranks = rank, ranks
        self.most_polls = most_polls
        self._window, self._windows = window, windows

    def all_reduce(self, x: Array) -> Array:
        """x float32 of any shape, of at most MAX_BYTES: in place, and returned."""
        return self._sum(x, None)

    def add(self, x: Array, residual: Array) -> Array:
        """residual += the sum of x over the ranks, in place, and returned; x is left as it is."""
        checks.array(residual, "residual", FLOAT32, x.shape)
        return self._sum(x, residual)

    def _sum(self, x: Array, residual: Array | None) -> Array:
        checks.array(x, "x", FLOAT32, x.shape)
        if x.nbytes > MAX_BYTES:
            checks.reject("x", f"of at most {MAX_BYTES} bytes", checks.describe(x))
        result = x if residual is None else residual
        self.kernels.launch(
            make_sum(self.ranks, residual is not None), ceil_div(x.size, CHUNK), THREADS, 0,
            x.reshape(-1), result.reshape(-1), bool(checks.is_aligned(x) and checks.is_aligned(result)), self.rank,
            self._window, self._windows, self.most_polls,
        )  # fmt: skip
        return result
