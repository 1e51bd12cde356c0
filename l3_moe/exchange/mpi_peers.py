"""Rows between ranks through host memory, by MPI: one message to each peer, written out, so that what is counted is what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Counters
from l2_dense_parallel.watchdog import GROUPS, OPERATIONS, Watchdog
from l3_moe.exchange.peers import parted

_ALL_TO_ALL = OPERATIONS.index("all_to_all")


class MPIPeers:
    """NumPy arrays. `communicator` is mpi4py's, `members` the world ranks in it; group: of watchdog.GROUPS."""

    def __init__(self, communicator: Any, watchdog: Watchdog, group: str, members: tuple[int, ...]) -> None:
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self.counters = Counters()
        self._comm = communicator
        self._watchdog = watchdog
        self._group = GROUPS.index(group)
        self._members = members

    def swap_counts(self, table: np.ndarray) -> np.ndarray:
        table = np.ascontiguousarray(table, np.int32)
        received = np.empty_like(table)
        self._exchange(list(table), list(received), "counts")
        return received

    def swap(self, rows: Array, sent: Sequence[int], received: Sequence[int], what: str) -> Array:
        return self._collected(parted(rows, sent), received, what)

    def gather(self, rows: Array, counts: Sequence[int]) -> Array:
        return self._collected([rows] * self.size, counts, "gather")

    def _collected(self, parts: list[np.ndarray], received: Sequence[int], what: str) -> np.ndarray:
        out = np.empty((sum(received), parts[0].shape[1]), np.float32)
        self._exchange(parts, parted(out, received), what)
        return out

    def _exchange(self, parts: list[np.ndarray], places: list[np.ndarray], what: str) -> None:
        """parts[j] to rank j, places[i] filled from rank i; its own is copied. Receives first, so that a message finds its place; and everybody
        starts with the rank after it, so that nobody is everybody's first."""
        places[self.rank][...] = parts[self.rank]
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [self._comm.Irecv(places[i], source=i) for i in reversed(others) if places[i].size]
        for j in others:
            if parts[j].size:
                requests.append(self._comm.Isend(parts[j], dest=j))
                self.counters.add(what, parts[j].nbytes)
        self._watchdog.enter(_ALL_TO_ALL, self._group, self._members)
        for request in requests:
            request.Wait()
        self._watchdog.leave()


class StagedPeers(MPIPeers):
    """CuPy arrays by way of host memory, for ranks that share one GPU (`--share-gpu`)."""

    def swap(self, rows: Array, sent: Sequence[int], received: Sequence[int], what: str) -> Array:
        return self._uploaded(rows, super().swap(rows.get(), sent, received, what))

    def gather(self, rows: Array, counts: Sequence[int]) -> Array:
        return self._uploaded(rows, super().gather(rows.get(), counts))

    @staticmethod
    def _uploaded(like: Array, host: np.ndarray) -> Array:
        result = type(like)(host.shape, np.float32)  # cupy.ndarray, uninitialised, in the current device's memory
        result.set(host)
        return result
