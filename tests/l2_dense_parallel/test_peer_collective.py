"""Sums over peer memory: what ranks agree on, with fakes in the GPU's place; and on two GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from l2_dense_parallel.peer_trial import Timing, crossover, describe, slowest, time_us, trial
from l2_dense_parallel.peer_windows import PeerWindows, WindowsRefused
from tests.l2_dense_parallel.launch import on_ranks

# -- windows ---------------------------------------------------------------------------------------------------------------


class Ranks:
    """Threads in the place of ranks: `communicator(r)` is rank r's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=10.0)
        self._values: list[Any] = [None] * size

    def communicator(self, rank: int) -> Any:
        def allgather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return SimpleNamespace(Get_rank=lambda: rank, allgather=allgather)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` gives, or the exception that it raised."""
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Runtime:
    """cupy.cuda.runtime of one rank; `refuses` names a call that fails."""

    def __init__(self, rank: int, refuses: str = "") -> None:
        self.rank, self.refuses = rank, refuses
        self.held: set[int] = set()
        self.zeroed: dict[int, int] = {}

    def _call(self, name: str) -> None:
        if name == self.refuses:
            raise RuntimeError(f"cudaErrorNotSupported: {name}")

    def malloc(self, size: int) -> int:
        self._call("malloc")
        assert size % (2 << 20) == 0
        self.held.add(1000 + self.rank)
        return 1000 + self.rank

    def memset(self, address: int, value: int, size: int) -> None:
        assert value == 0
        self.zeroed[address] = size

    def deviceSynchronize(self) -> None:  # noqa: N802 (CuPy's names)
        self._call("deviceSynchronize")

    def ipcGetMemHandle(self, address: int) -> bytes:  # noqa: N802
        self._call("ipcGetMemHandle")
        return bytes([address - 1000])

    def ipcOpenMemHandle(self, handle: bytes) -> int:  # noqa: N802
        self._call("ipcOpenMemHandle")
        assert handle[0] != self.rank, "a process cannot open its own handle"
        address = 2000 + 10 * self.rank + handle[0]
        self.held.add(address)
        return address

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        self.held.remove(address)

    def free(self, address: int) -> None:
        self.held.remove(address)


def open_windows(runtimes: list[Runtime], hosts: list[str]) -> list[Any]:
    ranks = Ranks(len(runtimes))
    return ranks.run(lambda rank: PeerWindows(runtimes[rank], ranks.communicator(rank), hosts, 12, most_ranks=8).addresses)


def test_every_rank_has_all_windows() -> None:
    runtimes = [Runtime(rank) for rank in range(3)]
    assert open_windows(runtimes, ["a"] * 3) == [[1000, 2001, 2002], [2010, 1001, 2012], [2020, 2021, 1002]]
    assert [runtime.zeroed for runtime in runtimes] == [{1000 + rank: 12} for rank in range(3)]


@pytest.mark.parametrize("refuses", ["malloc", "deviceSynchronize", "ipcGetMemHandle", "ipcOpenMemHandle"])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 2)])
def test_one_rank_without_windows_is_all(refuses: str, who: tuple[int, ...]) -> None:
    runtimes = [Runtime(rank, refuses if rank in who else "") for rank in range(3)]
    found = open_windows(runtimes, ["a"] * 3)
    assert {type(one) for one in found} == {WindowsRefused}
    assert {str(one) for one in found} == {f"the GPUs do not open their memory to each other (cudaErrorNotSupported: {refuses})"}
    assert not any(runtime.held for runtime in runtimes), "memory that nobody uses is kept"


def test_windows_are_of_one_machine() -> None:
    found = open_windows([Runtime(0), Runtime(1)], ["a", "b"])
    assert [str(one) for one in found] == ["the ranks are on 2 machines"] * 2
    assert [str(one) for one in open_windows([Runtime(rank) for rank in range(9)], ["a"] * 9)] == ["9 ranks, and 8 at most"] * 9


# -- the trial, and what is measured ---------------------------------------------------------------------------------------


class Sums:
    """Two ranks' sums, the second rank's numbers being known."""

    rank, ranks = 0, 2

    def __init__(self, change: Callable[[np.ndarray], None]) -> None:
        self.change = change
        self.sizes: list[int] = []

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        self.sizes.append(x.size)
        x += 2 * x
        self.change(x)
        return x


def damage_last(x: np.ndarray) -> None:
    x[-1] += 1


def damage_one_of_many(x: np.ndarray) -> None:
    if x.size > 2000:
        x[1024] = 0


def forget(x: np.ndarray) -> None:
    x /= 3


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda x: None, ""), (damage_last, "1 of 1 numbers are wrong"), (damage_one_of_many, "1 of 65536 numbers are wrong"), (forget, "1 of 1 numbers are wrong")
    ],
)  # fmt: skip
def test_the_trial(change: Callable[[np.ndarray], None], fault: str) -> None:
    sums = Sums(change)
    assert trial(sums, np.copy, np.asarray) == fault
    assert len(sums.sizes) == 5, "a rank that stops at the first fault leaves the others waiting"


def test_the_slowest_rank_decides() -> None:
    measured = [[(4096, 7.0, 4.0), (8192, 7.5, 8.0)], [(4096, 6.0, 5.0), (8192, 9.0, 7.0)]]
    assert slowest(measured) == [Timing(4096, 7.0, 5.0), Timing(8192, 9.0, 8.0)]


def test_the_crossover() -> None:
    assert crossover([Timing(4096, 7.0, 5.0), Timing(8192, 9.0, 9.0), Timing(16384, 9.0, 9.1)]) == 8192
    assert crossover([Timing(4096, 7.0, 7.1), Timing(8192, 9.0, 8.0), Timing(16384, 9.0, 12.0)]) == 8192
    assert crossover([Timing(4096, 5.0, 7.0)]) == 0 and crossover([]) == 0


def test_what_is_said() -> None:
    timings = [Timing(4096, 7.04, 5.0), Timing(8192, 9.0, 8.0)]
    assert describe(8192, timings) == "all-reduce in one launch up to 8 KiB, beyond by NCCL (us in one launch | by NCCL: 4 KiB 5.0 | 7.0, 8 KiB 8.0 | 9.0)"
    assert describe(0, timings).startswith("all-reduce by NCCL, which was faster at all sizes (")


def test_time_is_the_median_of_a_call() -> None:
    """Of replays after the first, each begun together."""
    elapsed, log = iter([9.0, 0.2, 0.1, 5.0]), []

    class Stream:
        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *exception: Any) -> None:
            pass

        def synchronize(self) -> None:
            log.append("synchronize")

        def begin_capture(self) -> None:
            log.append("begin")

        def end_capture(self) -> Any:
            log.append("end")
            return SimpleNamespace(launch=lambda stream: log.append("launch"))

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    cuda = SimpleNamespace(Stream=lambda non_blocking: Stream(), Event=lambda: event, get_current_stream=Stream, get_elapsed_time=lambda start, end: next(elapsed))
    assert time_us(cuda, lambda: log.append("barrier"), lambda: log.append("call"), calls=2, rounds=3) == pytest.approx(100.0)
    assert log == ["synchronize", "call", "synchronize", "begin", "call", "call", "end", *["barrier", "launch"] * 4]


# -- on two GPUs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu2
@pytest.mark.mpi
@pytest.mark.parametrize("how", ["auto", "one-shot"])
def test_small_sums(how: str) -> None:
    ended = on_ranks(2, "gpu_small_sums", how, limit=180.0)
    assert ended.status == 0, ended.err
    assert ended.out.count("small sums right on GPU") == 2


@pytest.mark.gpu2
@pytest.mark.mpi
@pytest.mark.parametrize("how", ["auto", "one-shot"])
def test_sums_in_a_graph(how: str) -> None:
    ended = on_ranks(2, "gpu_graph_sums", how, limit=180.0)
    assert ended.status == 0, ended.err
    assert ended.out.count("graph sums right on GPU") == 2


@pytest.mark.gpu2
@pytest.mark.mpi
def test_sums_with_norms() -> None:
    ended = on_ranks(2, "gpu_norm_sums", limit=180.0)
    assert ended.status == 0, ended.err
    assert ended.out.count("norms right on GPU") == 2


@pytest.mark.gpu2
@pytest.mark.mpi
def test_a_wrong_sum_is_refused() -> None:
    ended = on_ranks(2, "gpu_refuses_a_wrong_sum", limit=180.0)
    assert ended.status != 0
    assert ended.errors == ["error: the one-shot all-reduce fails on rank 1 (1 of 1 numbers are wrong); go on with --all-reduce nccl"]
