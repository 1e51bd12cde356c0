"""What goes from stage to stage: hidden states downwards, tokens and who still runs between hosts. Here all of it by MPI, over host memory;
`nccl_pipe.py` keeps hidden states on GPUs.

A send does not wait for its receiver: it keeps the array until MPI is done with it. What one stage sends another arrives in the order in
which it was sent, so nothing carries a label.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from l1_kernels.weight import Array
from l2_dense_parallel.collectives import Counters
from l2_dense_parallel.watchdog import GROUPS, OPERATIONS, Watchdog

_RECEIVE, _PP = OPERATIONS.index("receive"), GROUPS.index("pp")


class Pipe(Protocol):
    """`stage` of `size`.

    direct   hidden states go from device to device, in the order of its streams: nothing on the host waits for them, so it may go on to the next work
    """

    stage: int
    size: int
    counters: Counters
    direct: bool

    def send(self, to: int, array: np.ndarray) -> None:
        """A C-contiguous array of the host, at once; the caller does not change it afterwards."""
        ...

    def receive(self, source: int, out: np.ndarray) -> np.ndarray:
        """Waits for as many bytes as `out` has, and returns it."""
        ...

    def ready(self, source: int) -> bool:
        """Whether `receive` would not wait."""
        ...

    def send_hidden(self, x: Array) -> None:
        """x float32 [T, D] of the device, as the current stream's work so far makes it, to the next stage. Nobody writes to x afterwards, unless
        the pipe is not direct: then it is read before this returns."""
        ...

    def receive_hidden(self, out: Array) -> None:
        """Fills out float32 [T, D] of the device from the stage before, for the current stream's work from here on."""
        ...

    def watched(self) -> Any:
        """`with pipe.watched():` the host waits for its device, and so perhaps for another stage."""
        ...

    def mark(self, part: float = 0.0) -> None:
        """Tells the watchdog, when the device comes to it, that a work is done; or, above 0, which part of the next one. Direct pipes only; else nothing."""
        ...

    def flush(self) -> None:
        """Waits until all that was sent has been taken."""
        ...


class MPIPipe:
    """`communicator`: mpi4py's, of the ranks with the same place in each stage; `members`: their world ranks."""

    direct = False

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

    def ready(self, source: int) -> bool:
        return self._comm.Iprobe(source=source)

    def send_hidden(self, x: Array) -> None:
        # Of a host device a copy: the next pass may write to x before it is sent. A GPU's come as new ones.
        self.send(self.stage + 1, np.array(x, np.float32) if isinstance(x, np.ndarray) else np.ascontiguousarray(x.get()))

    def receive_hidden(self, out: Array) -> None:
        if isinstance(out, np.ndarray):
            self.receive(self.stage - 1, out)
        else:
            out.set(self.receive(self.stage - 1, np.empty(out.shape, np.float32)))

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._watchdog.waiting_for_device("pp", self._members):
            yield

    def mark(self, part: float = 0.0) -> None:
        return

    def flush(self) -> None:
        self._watchdog.enter(_RECEIVE, _PP, self._members)
        while self._sent:
            self._sent.popleft()[0].Wait()
        self._watchdog.leave()


def passed(event: Any) -> bool:
    """Whether the device has come to it; a host's always has."""
    return getattr(event, "done", True)
