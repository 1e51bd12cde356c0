"""Collectives over host memory, by MPI (design, section 2: the cpu and sim devices, and ranks that share a GPU)."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from l1_kernels.regions import NormArgs
from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Counters, check_float32
from l2_dense_parallel.watchdog import GROUPS, OPERATIONS, Watchdog

_ALL_REDUCE, _ALL_GATHER, _BROADCAST, _BARRIER, _GATHER = (
    OPERATIONS.index(name) for name in ("all_reduce", "all_gather", "broadcast", "barrier", "gather")
)


class MPICollective:
    """NumPy arrays. `communicator` is mpi4py's, `members` the world ranks in it.

    MPI does not promise the same sum on every rank, but every algorithm in use keeps it: a piece is either summed once
    and sent to all, or summed pairwise, where a + b = b + a. A test compares bits."""

    capturable = False  # MPI runs on the host, now
    note = ""

    def __init__(self, communicator: Any, watchdog: Watchdog, group: str, members: tuple[int, ...]) -> None:
        from mpi4py import MPI

        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self.counters = Counters()
        self._comm = communicator
        self._watchdog = watchdog
        self._group = GROUPS.index(group)
        self._members = members
        self._in_place = MPI.IN_PLACE

    def all_reduce(self, x: Array) -> Array:
        check_float32(x, "all_reduce")
        self.counters.add("all_reduce", x.nbytes)
        self._watchdog.enter(_ALL_REDUCE, self._group, self._members)
        self._comm.Allreduce(self._in_place, x)
        self._watchdog.leave()
        return x

    def reduce_add(self, x: Array, residual: Array) -> Array | None:
        return None

    def reduce_add_norm(self, x: Array, residual: Array, norm: NormArgs, dtype: str) -> Array | None:
        return None

    def all_gather(self, x: Array) -> Array:
        check_float32(x, "all_gather", 2)
        self.counters.add("all_gather", x.nbytes)
        n, m = x.shape
        parts = np.empty((self.size, n, m), np.float32)
        self._watchdog.enter(_ALL_GATHER, self._group, self._members)
        self._comm.Allgather(x, parts)
        self._watchdog.leave()
        return parts.transpose(1, 0, 2).reshape(n, self.size * m)  # copies only where n > 1

    def broadcast(self, obj: Any) -> Any:
        data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) if self.rank == 0 else b""
        self.counters.add("broadcast", len(data))
        self._watchdog.enter(_BROADCAST, self._group, self._members)
        data = self._comm.bcast(data, root=0)
        self._watchdog.leave()
        return obj if self.rank == 0 else pickle.loads(data)

    def gather(self, obj: Any) -> list[Any] | None:
        data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        self.counters.add("gather", len(data))
        self._watchdog.enter(_GATHER, self._group, self._members)
        parts = self._comm.gather(data, root=0)
        self._watchdog.leave()
        return None if parts is None else [pickle.loads(part) for part in parts]

    def barrier(self) -> None:
        self.counters.add("barrier", 0)
        self._watchdog.enter(_BARRIER, self._group, self._members)
        self._comm.Barrier()
        self._watchdog.leave()

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()  # ranks wait for each other in the calls above, which are watched

    def mark(self, part: float) -> None:
        return


class StagedCollective(MPICollective):
    """CuPy arrays by way of host memory, for ranks that share one GPU (`--share-gpu`). Right, and slow: each call waits
    for the current stream."""

    def all_reduce(self, x: Array) -> Array:
        check_float32(x, "all_reduce")
        x.set(super().all_reduce(x.get()))
        return x

    def all_gather(self, x: Array) -> Array:
        check_float32(x, "all_gather", 2)
        gathered = super().all_gather(x.get())
        result = type(x)(gathered.shape, np.float32)  # cupy.ndarray, uninitialised, in the current device's memory
        result.set(np.ascontiguousarray(gathered))
        return result
