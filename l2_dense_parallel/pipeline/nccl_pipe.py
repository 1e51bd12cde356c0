"""Hidden states from GPU to GPU, by NCCL: a communicator of two ranks for each pair of neighbours, a stream for what comes and one for what goes.

    host      receive 1 . compute 1 . send 1 . receive 2 . compute 2 . send 2 ...         only enqueues, so it may be several works ahead
    receives  [recv 1]      [recv 2]
    compute            [work 1]     [work 2]                                              waits for a receive by an event
    sends                      [send 1]     [send 2]                                      waits for the compute stream by an event

**Why nothing waits for ever.** On every link work k's send and its receive are the k-th: all stages are told the works by their first one, one after the
other, and enqueue them in that order. Take the worst case, in which a GPU does everything in the order in which its host enqueued it, one thing
at a time (streams that share a hardware queue; a kernel whose loading waits for all work): then send (k, s), which meets receive (k, s + 1), waits for

    (k, s - 1)        its stage's receive of the same work
    (k - 1, s)        its stage's send before
    (k - 1, s + 1)    the receiver's send before: the receive comes after it

and for tokens of works before k on the last stage. All of these are of a smaller k, or of the same k and a smaller s, so the waits have no cycle; streams
only take some of them away. Tensor-parallel ranks of a stage meet inside a work, each of them at the same place of this order, so they are one stage in it. No host waits for
its GPU but for tokens (and, before it records a graph, for what this reads), and those are of works that are enqueued on every stage.

**Who keeps an array.** CuPy's pool gives freed memory to the next one who asks on the same stream, without waiting for other streams. So what is sent is kept until
its event has passed; and what comes in is written either by a receive that waits for the compute stream first, or into buffers that are the pipe's for good.

**Receives ahead of time.** A receive that waits for its sender keeps multiprocessors busy, the more the larger it is. One of up to `ahead_bytes` goes into one of two buffers
while the work before still computes, and is copied from there. A larger one (prompts) begins when the work before is done: its link's time is then not hidden, which is
little beside its work's, and the stage that waits for the other is the one that has nothing to do.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np

from l1_kernels.device import Device
from l1_kernels.errors import UserError
from l1_kernels.weight import Array
from l2_dense_parallel.nccl_collective import START_LIMIT, _import_nccl
from l2_dense_parallel.pipeline.pipe import MPIPipe, passed
from l2_dense_parallel.watchdog import Watchdog
from l2_dense_parallel.world import merge_texts, one_line

AHEAD_BYTES = 1 << 20  # 64 tokens of GPT-J
BUFFERS = 2


class Link(Protocol):
    """Between two neighbours. Both calls enqueue, on `stream`, and return; arrays are float32, contiguous, of the device."""

    def send(self, x: Array, stream: Any) -> None: ...
    def receive(self, out: Array, stream: Any) -> None: ...

    def check(self) -> None:
        """Raises what has failed in the background."""
        ...


class NCCLLink:
    """`peer`: the other one's rank in the communicator of two."""

    def __init__(self, nccl: Any, identity: Any, rank: int) -> None:
        self._nccl, self._peer = nccl, 1 - rank
        self._comm = nccl.NcclCommunicator(2, identity, rank)

    def send(self, x: Array, stream: Any) -> None:
        self._comm.send(x.data.ptr, x.size, self._nccl.NCCL_FLOAT32, self._peer, stream.ptr)

    def receive(self, out: Array, stream: Any) -> None:
        self._comm.recv(out.data.ptr, out.size, self._nccl.NCCL_FLOAT32, self._peer, stream.ptr)

    def check(self) -> None:
        self._comm.check_async_error()


class _Buffer:
    """floats: what a receive writes. arrived: it is there. read: it has been copied, and may be overwritten."""

    def __init__(self, device: Device, size: int) -> None:
        self.floats = device.empty(size, np.float32)
        self.arrived, self.read = device.event(), device.event()


class NCCLPipe(MPIPipe):
    """An `MPIPipe` for what hosts say to each other. before, after: the links to the neighbours, None where there is none."""

    direct = True

    def __init__(
        self, communicator: Any, watchdog: Watchdog, members: tuple[int, ...], device: Device, before: Link | None, after: Link | None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:  # fmt: skip
        super().__init__(communicator, watchdog, members)
        self.ahead_bytes = ahead_bytes
        self._device, self._before, self._after = device, before, after
        self._sends, self._receives = device.stream(), device.stream()
        self._kept: deque[tuple[Any, Array]] = deque()  # (its send is over, what it sends)
        self._buffers = [_Buffer(device, ahead_bytes // 4) for _ in range(BUFFERS)] if before is not None and ahead_bytes else []
        self._received = 0
        self._works = 0
        self._said, self._says = device.mapped(1, np.float64)
        watchdog.progress = lambda: float(self._said[0])
        for buffer in self._buffers:
            buffer.read.record(device.current_stream())  # the pool may have had it from work that is still under way
        for stream in (self._sends, self._receives):
            self._follow(stream)

    def send_hidden(self, x: Array) -> None:
        assert self._after is not None, "the last stage sends no hidden states"
        self.counters.add("send", x.nbytes)
        x = self._device.xp.ascontiguousarray(x)
        self._follow(self._sends)
        self._after.send(x, self._sends)
        sent = self._device.event()
        self._sends.record(sent)
        self._kept.append((sent, x))
        while self._kept and passed(self._kept[0][0]):
            self._kept.popleft()

    def receive_hidden(self, out: Array) -> None:
        assert self._before is not None, "the first stage receives no hidden states"
        self.counters.add("receive", out.nbytes)
        stream = self._device.current_stream()
        if out.nbytes > self.ahead_bytes:
            self._follow(self._receives)  # out's memory may be in use until here
            self._before.receive(out, self._receives)
            arrived = self._device.event()
            self._receives.record(arrived)
            stream.wait_event(arrived)
            return
        buffer = self._buffers[self._received % BUFFERS]
        self._received += 1
        self._receives.wait_event(buffer.read)
        floats = buffer.floats[: out.size]
        self._before.receive(floats, self._receives)
        self._receives.record(buffer.arrived)
        stream.wait_event(buffer.arrived)
        self._device.copy(out.reshape(1, 1, -1), floats.reshape(1, 1, -1), stream)
        stream.record(buffer.read)

    def mark(self, part: float = 0.0) -> None:
        self._works += part == 0.0
        self._says.fill(self._works + part)

    def flush(self) -> None:
        super().flush()
        with self.watched():
            while self._kept:
                self._kept.popleft()[0].synchronize()
        for link in (self._before, self._after):
            if link is not None:
                link.check()

    def _follow(self, stream: Any) -> None:
        """What is enqueued on `stream` from here on waits for the current stream's work so far."""
        here = self._device.event()
        self._device.current_stream().record(here)
        stream.wait_event(here)


def open_nccl_pipe(communicator: Any, watchdog: Watchdog, members: tuple[int, ...], device: Device) -> NCCLPipe:
    """Connects the neighbours: every link with a first message, since NCCL connects two ranks at their first send. UserError, the same on all stages, where NCCL is missing or fails."""
    stage, size = communicator.Get_rank(), communicator.Get_size()
    failure, nccl, identity = "", None, None
    try:
        _, nccl = _import_nccl()
        identity = nccl.get_unique_id() if stage < size - 1 else None  # of the link to the next stage
    except (UserError, RuntimeError) as error:
        failure = one_line(error)
    with watchdog.waiting("set-up", "pp", members, START_LIMIT):
        told = communicator.allgather((failure, identity))
        if any(failures := [text for text, _ in told]):
            raise UserError(merge_texts(failures))
        assert nccl is not None
        links: list[NCCLLink | None] = [None, None]
        number, stream = device.zeros(1, np.float32), device.stream()
        device.synchronize()
        try:
            if stage > 0:  # stage by stage: the next link's first call waits for this one
                links[0] = before = NCCLLink(nccl, told[stage - 1][1], 1)
                before.receive(number, stream)
                stream.synchronize()
            if stage < size - 1:
                links[1] = after = NCCLLink(nccl, told[stage][1], 0)
                number += 1
                stream.wait_event(device.current_stream().record())
                after.send(number, stream)
                stream.synchronize()
        except (nccl.NcclError, KeyError) as error:  # KeyError: CuPy has no name for that failure
            raise UserError(
                f"NCCL cannot connect the GPUs of ranks {', '.join(map(str, members))} ({one_line(error)}); NCCL_DEBUG=WARN says why, "
                "and --share-gpu goes by way of host memory"
            ) from None
        right = stage == 0 or float(device.to_host(number)[0]) == stage + (stage < size - 1)
        wrong = [str(members[at]) for at, fine in enumerate(communicator.allgather(right)) if not fine]
        if wrong:
            raise UserError(f"NCCL delivers wrong numbers to rank {', '.join(wrong)}; use --share-gpu, which goes by way of host memory")
    return NCCLPipe(communicator, watchdog, members, device, links[0], links[1])
