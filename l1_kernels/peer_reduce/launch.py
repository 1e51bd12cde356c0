"""One rank's part in sums over its peers: which kernel, for which array."""

from __future__ import annotations

import numpy as np

from l1_kernels import checks
from l1_kernels.checks import FLOAT32, INT32
from l1_kernels.gpu_kernels import GpuKernels, ceil_div
from l1_kernels.peer_reduce.exchange import MAX_POLLS
from l1_kernels.peer_reduce.gpu import make_sum
from l1_kernels.peer_reduce.layout import CHUNK, MAX_NUMBERS, MAX_TOKENS, MAX_WIDTH, THREADS, window_words
from l1_kernels.peer_reduce.norm import make_norm_sum
from l1_kernels.regions import NormArgs
from l1_kernels.weight import CARRIER, Array

MAX_BYTES = 4 * MAX_NUMBERS


class PeerReduce:
    """Every rank makes the same calls in the same order, each rank's on streams that wait for each other: a launch must see the one before it done.

    window      this rank's, int32 [layout.window_words], zeros before the first sum
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

    def takes_norm(self, x: Array) -> bool:
        """Whether `add_norm` can be had for an x of this shape, the same on every rank."""
        return x.ndim == 2 and 1 <= x.shape[0] <= MAX_TOKENS and x.shape[1] % 8 == 0 and 8 <= x.shape[1] <= MAX_WIDTH

    def add_norm(self, x: Array, residual: Array, norm: NormArgs, dtype: str) -> Array:
        """`add` of x [T, D]; returns the norm of the new residual, [T, D] in the carrier of `dtype` ("fp16", "bf16")."""
        checks.array(x, "x", FLOAT32, x.shape)
        checks.array(residual, "residual", FLOAT32, x.shape)
        if not self.takes_norm(x):
            checks.reject("x", f"[1..{MAX_TOKENS}, a multiple of 8 up to {MAX_WIDTH}]", checks.describe(x))
        vectors = [("norm.weight", norm.weight), *([] if norm.bias is None else [("norm.bias", norm.bias)])]
        for name, vector in vectors:
            checks.array(vector, name, FLOAT32, x.shape[1:])
        for name, array in (("x", x), ("residual", residual), *vectors):
            if not checks.is_aligned(array):
                checks.reject(name, "at a multiple of 16 bytes", checks.describe(array))
        rows = self.kernels.new(x.shape, CARRIER[dtype])
        threads = norm_threads(x.shape[1])
        self.kernels.launch(
            make_norm_sum(self.ranks, norm.kind, dtype, threads), x.shape[0], threads, 0,
            x, residual, norm.weight, self.kernels.or_absent(norm.bias), norm.bias is not None, np.float32(norm.eps), rows, self.rank,
            self._window, self._windows, self.most_polls,
        )  # fmt: skip
        return rows

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


def norm_threads(width: int) -> int:
    """Eight numbers a thread, in whole warps: the norm's own launch has as many (sbi_gemm/launch.py), so its sums are of the same order."""
    return ceil_div(width, 256) * 32
