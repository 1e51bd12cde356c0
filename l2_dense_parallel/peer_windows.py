"""Memory on each rank's GPU that the other ranks of the machine write to, by CUDA's IPC handles. All ranks have all windows, or none has any.

A plain allocation of its own, not CuPy's pool's: a handle opens the whole allocation behind it, other ranks would see what else lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from l2_dense_parallel.world import one_line

GRAIN = 2 << 20  # bytes; smaller allocations may share a page, and a handle opens the page


class WindowsRefused(Exception):
    """Why there are no windows: the same text on all ranks."""


class PeerWindows:
    """addresses[r]: rank r's window as this process sees it, zeros in the beginning. The memory lasts as long as the process: a peer may
    write to it until then."""

    def __init__(self, runtime: Any, communicator: Any, hosts: Sequence[str], size: int, most_ranks: int) -> None:
        """All ranks of the communicator call it together, each with its GPU current. runtime: cupy.cuda.runtime; hosts: each rank's; size in
        bytes. Raises WindowsRefused on all ranks or on none."""
        self.rank: int = communicator.Get_rank()
        self.addresses: list[int] = []
        if len(set(hosts)) > 1:
            raise WindowsRefused(f"the ranks are on {len(set(hosts))} machines")
        if len(hosts) > most_ranks:
            raise WindowsRefused(f"{len(hosts)} ranks, and {most_ranks} at most")
        self._runtime = runtime
        own, handle, failure = 0, b"", ""
        try:
            own = runtime.malloc(-(-size // GRAIN) * GRAIN)
            runtime.memset(own, 0, size)
            runtime.deviceSynchronize()
            handle = runtime.ipcGetMemHandle(own)
        except Exception as error:  # the driver's, of whatever type: without windows NCCL goes on
            failure = one_line(error)
        opened: dict[int, int] = {}
        handles = communicator.allgather((failure, handle))
        failures = [text for text, _ in handles]
        if not any(failures):
            try:
                for rank, (_, theirs) in enumerate(handles):
                    if rank != self.rank:
                        opened[rank] = runtime.ipcOpenMemHandle(theirs)
            except Exception as error:
                failure = one_line(error)
            failures = communicator.allgather(failure)
        if any(failures):
            self._close(own, opened)
            first = next(rank for rank, text in enumerate(failures) if text)
            raise WindowsRefused(f"the GPUs do not open their memory to each other ({failures[first]})")
        self.addresses = [own if rank == self.rank else opened[rank] for rank in range(len(hosts))]

    def _close(self, own: int, opened: dict[int, int]) -> None:
        """After a refusal. Nobody has written anything."""
        try:
            for address in opened.values():
                self._runtime.ipcCloseMemHandle(address)
            if own:
                self._runtime.free(own)
        except Exception:  # what was refused may not close either; it is freed when the process ends
            pass
