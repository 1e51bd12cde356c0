"""Rows between GPUs, by NCCL: a group of sends and receives, enqueued on the current stream, which waits for nothing on the host.

NCCL has no uneven all-to-all; a grouped call of one send and one receive for each peer is one, and goes on as one kernel. The host must know how many
rows there are: where they are uneven, counts go by MPI first (`swap_counts`); where every token has its slot (slots.py) they are known, and a CUDA graph
can hold the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from l1_kernels.device import Device
from l1_kernels.errors import UserError
from l1_kernels.weight import Array
from l2_dense_parallel.nccl_collective import START_LIMIT, _import_nccl
from l2_dense_parallel.watchdog import Watchdog
from l2_dense_parallel.world import merge_texts, one_line
from l3_moe.exchange.mpi_peers import MPIPeers
from l3_moe.exchange.peers import parted


class RowLink(Protocol):
    """All peers' sends and receives of one swap, on the current stream. Arrays are float32, contiguous, of the device."""

    def swap(self, sends: list[tuple[int, Array]], receives: list[tuple[int, Array]]) -> None: ...


class NCCLRowLink:
    def __init__(self, nccl: Any, communicator: Any, device: Device) -> None:
        self._nccl, self._comm, self._device = nccl, communicator, device

    def swap(self, sends: list[tuple[int, Array]], receives: list[tuple[int, Array]]) -> None:
        here: Any = self._device.current_stream()
        nccl, stream = self._nccl, here.ptr
        nccl.groupStart()
        for peer, part in sends:
            self._comm.send(part.data.ptr, part.size, nccl.NCCL_FLOAT32, peer, stream)
        for peer, part in receives:
            self._comm.recv(part.data.ptr, part.size, nccl.NCCL_FLOAT32, peer, stream)
        nccl.groupEnd()


class NCCLPeers(MPIPeers):
    """Arrays of the device; counts by MPI. The watchdog hears of waits for the device where the host does wait (`Collective.watched`)."""

    def __init__(self, communicator: Any, watchdog: Watchdog, group: str, members: tuple[int, ...], device: Device, link: RowLink) -> None:
        super().__init__(communicator, watchdog, group, members)
        self._device = device
        self._link = link

    def swap(self, rows: Array, sent: Sequence[int], received: Sequence[int], what: str) -> Array:
        return self._enqueued(parted(rows, sent), received, what)

    def gather(self, rows: Array, counts: Sequence[int]) -> Array:
        return self._enqueued([rows] * self.size, counts, "gather")

    def _enqueued(self, parts: list[Array], received: Sequence[int], what: str) -> Array:
        out = self._device.empty((sum(received), parts[0].shape[1]), np.float32)
        places = parted(out, received)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        sends = [(peer, parts[peer]) for peer in others if parts[peer].size]
        for _, part in sends:
            self.counters.add(what, part.nbytes)
        if parts[self.rank].size:
            places[self.rank][...] = parts[self.rank]
        self._link.swap(sends, [(peer, places[peer]) for peer in others if places[peer].size])
        return out


def open_nccl_peers(communicator: Any, watchdog: Watchdog, group: str, members: tuple[int, ...], device: Device) -> NCCLPeers:
    """Connects the GPUs of the group, each rank's own being current, by a first swap of one number. UserError, the same on all, where NCCL is missing or fails."""
    rank, size = communicator.Get_rank(), communicator.Get_size()
    failure, nccl, identity = "", None, None
    try:
        _, nccl = _import_nccl()
        identity = nccl.get_unique_id() if rank == 0 else None
    except (UserError, RuntimeError) as error:
        failure = one_line(error)
    with watchdog.waiting("set-up", group, members, START_LIMIT):
        if any(failures := communicator.allgather(failure)):
            raise UserError(merge_texts(failures))
        assert nccl is not None
        identity = communicator.bcast(identity, root=0)
        try:
            link = NCCLRowLink(nccl, nccl.NcclCommunicator(size, identity, rank), device)
            peers = NCCLPeers(communicator, watchdog, group, members, device, link)
            numbers = device.zeros((size, 1), np.float32)
            numbers += rank
            found = device.to_host(peers.swap(numbers, [1] * size, [1] * size, "set-up"))
        except (nccl.NcclError, KeyError) as error:  # KeyError: CuPy has no name for that failure
            raise UserError(
                f"NCCL cannot connect the GPUs of ranks {', '.join(map(str, members))} ({one_line(error)}); NCCL_DEBUG=WARN says why, "
                "and --share-gpu goes by way of host memory"
            ) from None
        if any(communicator.allgather(found.ravel().tolist() != list(range(size)))):
            raise UserError(f"NCCL delivers wrong numbers among ranks {', '.join(map(str, members))}; use --share-gpu, which goes by way of host memory")
    peers.counters.clear()
    return peers
