"""Rows between GPUs: what is enqueued, with a link of threads in NCCL's place; on two GPUs NCCL itself."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from l1_kernels.device import open_device
from l3_moe.exchange.nccl_peers import NCCLPeers, NCCLRowLink
from tests.l2_dense_parallel.launch import environment, mpirun, start
from tests.l3_moe.exchange.threads import FakeCommunicator, Mail, Watch, on_threads

SIZE = 3


class ThreadLink:
    """A swap between threads, in the order in which NCCL has it: all sends are posted, then receives are waited for."""

    def __init__(self, communicator: FakeCommunicator) -> None:
        self.communicator = communicator

    def swap(self, sends: list[tuple[int, np.ndarray]], receives: list[tuple[int, np.ndarray]]) -> None:
        assert all(part.flags.c_contiguous and part.size for _, part in [*sends, *receives])  # NCCL reads from a pointer on
        for peer, part in sends:
            self.communicator.Isend(part, dest=peer)
        for peer, part in receives:
            self.communicator.Irecv(part, source=peer).Wait()


def open_peers(mail: Mail, ranks: int, me: int) -> NCCLPeers:
    members = list(range(ranks))
    rows, counts = FakeCommunicator(mail, "rows", members, me), FakeCommunicator(mail, "counts", members, me)
    return NCCLPeers(counts, Watch, "across", tuple(members), open_device("cpu"), ThreadLink(rows))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_rows(ranks: int) -> None:
    counts = np.random.default_rng(ranks).integers(0, 4, (ranks, ranks))  # from, to
    counts[0, 1] = 0
    mail = Mail()

    def rank(me: int) -> Any:
        peers = open_peers(mail, ranks, me)
        rows = np.concatenate([np.full((counts[me, to], SIZE), 10 * me + to, np.float32) for to in range(ranks)])
        back = peers.swap_counts(counts[me].reshape(ranks, 1, 1)).ravel()
        return back.tolist(), peers.swap(rows, counts[me].tolist(), back.tolist(), "rows there"), dict(peers.counters.messages)

    for me, (came, rows, messages) in enumerate(on_threads(ranks, rank)):
        assert came == counts[:, me].tolist()
        assert rows[:, 0].tolist() == [10 * source + me for source in range(ranks) for _ in range(counts[source, me])]
        with_rows = int(sum(counts[me, to] > 0 for to in range(ranks) if to != me))
        assert messages == {"counts": ranks - 1, **({"rows there": with_rows} if with_rows else {})}


def test_gathered_rows() -> None:
    mail = Mail()

    def rank(me: int) -> Any:
        return open_peers(mail, 3, me).gather(np.full((me, SIZE), me, np.float32), [0, 1, 2])

    for rows in on_threads(3, rank):
        assert rows[:, 0].tolist() == [1, 2, 2]


def test_nccl_is_called_in_one_group() -> None:
    """NCCL runs the calls of a group together; one by one, two ranks that both send first would wait for each other."""
    calls: list[Any] = []

    class Nccl:
        NCCL_FLOAT32 = 7
        groupStart = staticmethod(lambda: calls.append("start"))
        groupEnd = staticmethod(lambda: calls.append("end"))

    class Communicator:
        send = staticmethod(lambda pointer, size, kind, peer, stream: calls.append(("send", pointer, size, kind, peer, stream)))
        recv = staticmethod(lambda pointer, size, kind, peer, stream: calls.append(("recv", pointer, size, kind, peer, stream)))

    class FakeArray:
        def __init__(self, pointer: int, size: int) -> None:
            self.data, self.size = type("Pointer", (), {"ptr": pointer}), size

    device: Any = type("Device", (), {"current_stream": lambda self: type("Stream", (), {"ptr": 9})})()
    NCCLRowLink(Nccl, Communicator, device).swap([(1, FakeArray(100, 4)), (2, FakeArray(200, 8))], [(2, FakeArray(300, 2))])
    assert calls == ["start", ("send", 100, 4, 7, 1, 9), ("send", 200, 8, 7, 2, 9), ("recv", 300, 2, 7, 2, 9), "end"]


@pytest.mark.gpu2
@pytest.mark.mpi
@pytest.mark.parametrize("arguments", [("1", "2", "8"), ("2", "2", "8"), ("1", "1", "8")])
def test_two_gpus(arguments: tuple[str, ...]) -> None:
    """TP, EP, experts: every form, and slots in a captured graph, on two GPUs."""
    command = [*mpirun(), "-n", "2", sys.executable, "-m", "tests.l3_moe.exchange.gpu_program", *arguments]
    ended = start(command, environment(), 240)
    assert ended.status == 0, ended.err
    assert ended.out.count("right on GPU") == 2
