"""What ranks try before sums go over peer memory: are they right, and from which size on is NCCL faster?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from l1_kernels.peer_reduce.layout import MAX_NUMBERS
from l1_kernels.weight import Array

SIZES = tuple(4096 << i for i in range(7))  # bytes, 4 to 256 KiB
CALLS, ROUNDS = 50, 7  # calls in a graph, and how often it is timed: the median counts


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of an all-reduce of so many bytes: each rank's median, and of those the slowest rank's."""

    bytes: int
    nccl_us: float
    one_shot_us: float


class Sums(Protocol):
    """l1_kernels.peer_reduce.launch.PeerReduce"""

    rank: int
    ranks: int

    def all_reduce(self, x: Array) -> Array: ...


def time_us(cuda: Any, barrier: Callable[[], None], call: Callable[[], Any], calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Microseconds of `call`, which launches on the current stream, in a CUDA graph of `calls`: the median of `rounds` replays that all ranks
    begin together. cuda: cupy.cuda."""
    cuda.get_current_stream().synchronize()
    stream = cuda.Stream(non_blocking=True)
    times = []
    with stream:
        call()  # compiles and loads, which a capture does not allow
        stream.synchronize()
        stream.begin_capture()
        try:
            for _ in range(calls):
                call()
        finally:
            graph = stream.end_capture()
        for _ in range(rounds + 1):
            barrier()
            start, end = cuda.Event(), cuda.Event()
            start.record()
            graph.launch(stream)
            end.record()
            end.synchronize()
            times.append(cuda.get_elapsed_time(start, end) * 1e3 / calls)
    return median(times[1:])  # the first replay uploads the graph


def trial(sums: Sums, to_device: Callable[[np.ndarray], Array], to_host: Callable[[Array], np.ndarray]) -> str:
    """What is wrong with them, or "". The numbers are whole, so float32 has their sums exactly, in any order. It goes on after a wrong one:
    the other ranks wait for this one's part in the rest."""
    failure = ""
    for turn, size in enumerate((1, 1023, MAX_NUMBERS, MAX_NUMBERS, 37)):
        numbers = np.arange(size) % 1009 + turn + 1
        x = to_device((numbers * (sums.rank + 1)).astype(np.float32))
        wrong = np.flatnonzero(to_host(sums.all_reduce(x)) != numbers * (sums.ranks * (sums.ranks + 1) // 2))
        if wrong.size and not failure:
            failure = f"{wrong.size} of {size} numbers are wrong"
    return failure


def slowest(measured: list[list[tuple[int, float, float]]]) -> list[Timing]:
    """All ranks' (bytes, us by NCCL, us in one launch) -> the slowest rank's of each size; the same on every rank, since all have all of it."""
    return [Timing(of_a_size[0][0], max(row[1] for row in of_a_size), max(row[2] for row in of_a_size)) for of_a_size in zip(*measured, strict=True)]


def crossover(timings: Sequence[Timing]) -> int:
    """The largest size, in bytes, at which one launch is no slower; 0 if there is none."""
    return max((timing.bytes for timing in timings if timing.one_shot_us <= timing.nccl_us), default=0)


def describe(one_shot_bytes: int, timings: Sequence[Timing]) -> str:
    where = f"in one launch up to {one_shot_bytes >> 10} KiB, beyond by NCCL" if one_shot_bytes else "by NCCL, which was faster at all sizes"
    times = ", ".join(f"{timing.bytes >> 10} KiB {timing.one_shot_us:.1f} | {timing.nccl_us:.1f}" for timing in timings)
    return f"all-reduce {where} (us in one launch | by NCCL: {times})"
