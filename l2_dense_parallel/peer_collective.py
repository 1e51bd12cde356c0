"""NCCL, and for small messages one launch in which the ranks write to each other's memory (l1_kernels/peer_reduce).

Which messages are small is measured when the collective is made: both ways for some sizes, in a CUDA graph, as a decode step has them. Where
memory cannot be shared (ranks on several machines, GPUs that do not reach each other) it is NCCL for all; `note` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from l1_kernels.errors import UserError
from l1_kernels.gpu_kernels import GpuKernels
from l1_kernels.peer_reduce.launch import MAX_BYTES, PeerReduce
from l1_kernels.peer_reduce.layout import MAX_RANKS, window_words
from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from l2_dense_parallel.collectives import check_float32
from l2_dense_parallel.nccl_collective import START_LIMIT, NCCLCollective
from l2_dense_parallel.peer_trial import SIZES, Timing, crossover, describe, slowest, time_us, trial
from l2_dense_parallel.peer_windows import PeerWindows, WindowsRefused
from l2_dense_parallel.watchdog import Watchdog
from l2_dense_parallel.world import name_ranks, one_line

TRIAL_POLLS = 1 << 26  # seconds (as groups.MAX_POLLS) for a peer to come in the trial: it may have a kernel to compile


class PeerCollective(NCCLCollective):
    """one_shot_bytes  all-reduces up to so many bytes are one launch; 0: none is
    timings            what that was decided by; empty where nothing was measured
    """

    def __init__(
        self, communicator: Any, watchdog: Watchdog, group: str, members: tuple[int, ...], kernels: GpuKernels, hosts: Sequence[str], mode: str = "auto"
    ) -> None:
        """hosts: each member's machine. mode "auto", or "one-shot": as far as windows go, and UserError where there are none."""
        super().__init__(communicator, watchdog, group, members)
        self.one_shot_bytes = 0
        self.timings: list[Timing] = []
        runtime = self._cupy.cuda.runtime
        with watchdog.waiting("set-up", group, members, START_LIMIT):
            try:
                self._windows = PeerWindows(runtime, communicator, hosts, 4 * window_words(self.size), MAX_RANKS)
            except WindowsRefused as refusal:
                if mode == "one-shot":
                    raise UserError(f"--all-reduce one-shot: {refusal}; leave it out") from None
                self.note = f"all-reduce by NCCL: {refusal}"
                return
            window, table = self._arrays(kernels)
            self._try(PeerReduce(kernels, self.rank, window, table, TRIAL_POLLS))
            self._reduce = PeerReduce(kernels, self.rank, window, table)
            if mode == "one-shot":
                self.one_shot_bytes = MAX_BYTES
                self.note = f"all-reduce in one launch up to {MAX_BYTES >> 10} KiB, as asked; beyond by NCCL"
                return
            self.timings = self.measure()
        self.one_shot_bytes = crossover(self.timings)
        self.note = describe(self.one_shot_bytes, self.timings)

    def all_reduce(self, x: Array) -> Array:
        if not self._is_small(x):
            return super().all_reduce(x)
        check_float32(x, "all_reduce")
        self.counters.add("all_reduce", x.nbytes)
        return self._reduce.all_reduce(x)

    def reduce_add(self, x: Array, residual: Array) -> Array | None:
        if not self._is_small(x):
            return None
        check_float32(x, "reduce_add")
        self.counters.add("reduce_add", x.nbytes)
        return self._reduce.add(x, residual)

    def reduce_add_norm(self, x: Array, residual: Array, norm: NormArgs, dtype: str) -> Array | None:
        if not (self._is_small(x) and self._reduce.takes_norm(x)):
            return None
        self.counters.add("reduce_add_norm", x.nbytes)
        return self._reduce.add_norm(x, residual, norm, dtype)

    def _is_small(self, x: Array) -> bool:
        """The same on all ranks, whose x are of one size."""
        return 0 < x.nbytes <= self.one_shot_bytes

    def _arrays(self, kernels: GpuKernels) -> tuple[Array, Array]:
        """This rank's window, and all ranks' addresses, as arrays."""
        cupy, words = self._cupy, window_words(self.size)
        memory = cupy.cuda.UnownedMemory(self._windows.addresses[self.rank], 4 * words, self._windows)
        return cupy.ndarray((words,), np.int32, cupy.cuda.MemoryPointer(memory, 0)), kernels.lasting(np.array(self._windows.addresses, np.int64))

    def _try(self, reduce: PeerReduce) -> None:
        """A few sums whose result is known, by all ranks together. UserError on all of them if one is wrong anywhere."""
        failure = ""
        try:
            failure = trial(reduce, self._cupy.asarray, self._cupy.asnumpy)
        except Exception as error:  # of the driver: a kernel that gave up waiting
            failure = one_line(error)
        failures = self._comm.allgather(failure)
        failed = [member for member, text in zip(self._members, failures, strict=True) if text]
        if failed:
            text = next(filter(None, failures))
            raise UserError(f"the one-shot all-reduce fails on {name_ranks(failed)} ({text}); go on with --all-reduce nccl")

    def measure(self, sizes: Sequence[int] = SIZES) -> list[Timing]:
        """An all-reduce of so many bytes (at most MAX_BYTES) both ways. All ranks call it together, and get the same."""
        by_nccl, found = super().all_reduce, []
        for size in sizes:
            x = self._cupy.zeros(size // 4, np.float32)
            found.append((size, self.time_us(partial(by_nccl, x)), self.time_us(partial(self._reduce.all_reduce, x))))
        self.counters.clear()
        return slowest(self._comm.allgather(found))

    def time_us(self, call: Callable[[], Any]) -> float:
        """Microseconds of `call` on this rank; all ranks call it together."""
        return time_us(self._cupy.cuda, self._comm.Barrier, call)
