"""What goes from stage to stage: hidden states downwards, tokens back. Over host memory, by MPI.

A send does not wait for its receiver: it keeps the array until MPI is done with it. What one stage sends another arrives in the order in
which it was sent, so nothing carries a label.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np

from l2_dense_parallel.collectives import Counters
from l2_dense_parallel.mesh import Mesh
from l2_dense_parallel.watchdog import GROUPS, OPERATIONS, Watchdog
from l2_dense_parallel.world import World

_RECEIVE, _PP = OPERATIONS.index("receive"), GROUPS.index("pp")


class Pipe(Protocol):
    """`stage` of `size`. Arrays are the host's, C-contiguous."""

    stage: int
    size: int
    counters: Counters

    def send(self, to: int, array: np.ndarray) -> None:
        """At once; the caller does not change the array afterwards."""
        ...

    def receive(self, source: int, out: np.ndarray) -> np.ndarray:
        """Waits for as many bytes as `out` has, and returns it."""
        ...

    def flush(self) -> None:
        """Waits until all that was sent has been taken."""
        ...


class MPIPipe:
    """`communicator`: mpi4py's, of the ranks with the same place in each stage; `members`: their world ranks."""

    def __init__(self, communicator: Any, watchdog: Watchdog, members: tuple[int, ...]) -> None:
        self.stage: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self.counters = Counters()
        self._comm = communicator
        self._watchdog = watchdog
        self._members = members
        self._sent: deque[tuple[Any, np.ndarray]] = deque()

    def send(self, to: int, array: np.ndarray) -> None:
        self.counters.add("send", array.nbytes)
        self._sent.append((self._comm.Isend(array, dest=to), array))
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()

    def receive(self, source: int, out: np.ndarray) -> np.ndarray:
        self.counters.add("receive", out.nbytes)
        self._watchdog.enter(_RECEIVE, _PP, (self._members[self.stage], self._members[source]))
        self._comm.Recv(out, source=source)
        self._watchdog.leave()
        return out

    def flush(self) -> None:
        self._watchdog.enter(_RECEIVE, _PP, self._members)
        while self._sent:
            self._sent.popleft()[0].Wait()
        self._watchdog.leave()


def open_pipe(world: World, mesh: Mesh) -> Pipe | None:
    """This rank's, or None where the mesh has one stage."""
    communicator = mesh.communicators.get("pp")
    if communicator is None or world.watchdog is None:
        return None
    return MPIPipe(communicator, world.watchdog, mesh.members["pp"])
