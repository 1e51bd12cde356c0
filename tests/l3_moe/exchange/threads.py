"""A stage's ranks as threads: the real forms over the real MPIPeers, whose communicator is a fake that hands arrays from thread to thread."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from l1_kernels.device import open_device
from l3_moe.exchange.flat import FlatExchange
from l3_moe.exchange.hierarchical import HierarchicalExchange
from l3_moe.exchange.mpi_peers import MPIPeers
from l3_moe.exchange.pcc import PCC, FourStepPCC, GatheringPCC
from l3_moe.exchange.peers import NoPeers, Peers
from l3_moe.exchange.placement import Placement

PATIENCE = 60.0  # s, of which a busy machine needs some; a message that is never sent fails the test

Watch = SimpleNamespace(enter=lambda *_: None, leave=lambda: None)


class Mail:
    """All messages between positions."""

    def __init__(self) -> None:
        self.boxes: dict[Any, queue.Queue] = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def box(self, key: Any) -> queue.Queue:
        with self.lock:
            return self.boxes[key]


class FakeCommunicator:
    """mpi4py's, as far as MPIPeers needs it. A send is over at once (the array is copied); a receive is done where it is waited for."""

    def __init__(self, mail: Mail, name: str, members: list[int], position: int) -> None:
        self.mail, self.name, self.members, self.position = mail, name, members, position

    def Get_rank(self) -> int:
        return self.members.index(self.position)

    def Get_size(self) -> int:
        return len(self.members)

    def Isend(self, array: np.ndarray, dest: int) -> Any:
        self.mail.box((self.name, self.position, self.members[dest])).put(np.array(array))
        return SimpleNamespace(Wait=lambda: None)

    def Irecv(self, out: np.ndarray, source: int) -> Any:
        def wait() -> None:
            found = self.mail.box((self.name, self.members[source], self.position)).get(timeout=PATIENCE)
            assert found.shape == out.shape and found.dtype == out.dtype, (found.shape, out.shape)
            out[...] = found

        return SimpleNamespace(Wait=wait)


def peers(mail: Mail, name: str, members: list[int], position: int) -> Peers:
    if len(members) == 1:
        return NoPeers()
    return MPIPeers(FakeCommunicator(mail, name, members, position), Watch, "stage", tuple(members))  # type: ignore[arg-type]


def make_exchange(form: str, placement: Placement, mail: Mail, node: int = 0) -> Any:
    device, position = open_device("cpu"), placement.position

    def group(name: str, members: list[int]) -> Peers:
        return peers(mail, name, members, position)

    if form == "flat":
        return FlatExchange(placement, device, group("stage", list(range(placement.ranks))))
    if form == "hierarchical":
        first = position // node * node
        inner, outer = list(range(first, first + node)), list(range(position % node, placement.ranks, node))
        return HierarchicalExchange(placement, device, group("node", inner), group("outer", outer))
    across = group("across", placement.across())
    if form == "pcc":
        return PCC(placement, device, across)
    in_group = group("tp", placement.tp_group())
    return GatheringPCC(placement, device, across, in_group) if form == "gathering" else FourStepPCC(placement, device, in_group, across)


def on_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """work(position) on each position at the same time; what each returns. The first fault is raised."""
    found: list[Any] = [None] * ranks
    faults: list[BaseException] = []

    def run(position: int) -> None:
        try:
            found[position] = work(position)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(position,)) for position in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise next((fault for fault in faults if not isinstance(fault, queue.Empty)), faults[0])
    return found
