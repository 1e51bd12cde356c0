"""Times on the GPU: launches in a CUDA graph, over weights that L2 does not hold.

One large buffer of random numbers stands for the weights of many layers: a matrix is a view into it, and a graph goes
through enough different ones that none is still in L2 when its turn comes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import CARRIER, Array, Weight

ROTATED_BYTES = 1_200_000_000
POOL_BYTES = 2_600_000_000
ALIGN = 256  # bytes
WARM_SECONDS = 0.008


class WeightPool:
    """Matrices of any shape, random, out of one buffer of some 2.6 GB."""

    def __init__(self, device: Device, dtype: str) -> None:
        xp = device.xp
        self.dtype = dtype
        piece = 1 << 24
        numbers = xp.random.standard_normal(piece, dtype=xp.float32) * np.float32(0.02)
        if dtype == "int8":
            data = xp.clip(xp.rint(numbers * 2000), -127, 127).astype(xp.int8)
        elif dtype == "fp16":
            data = numbers.astype(xp.float16).view(xp.uint16)
        elif dtype == "bf16":
            data = (numbers.view(xp.uint32) >> 16).astype(xp.uint16)
        else:
            data = numbers
        self.itemsize = np.dtype(CARRIER[dtype]).itemsize
        self._pool = xp.tile(data, POOL_BYTES // (piece * self.itemsize))
        self._scale = xp.full(1 << 17, 0.02 / 40, xp.float32)

    def matrices(self, outputs: int, inner: int) -> list[Weight]:
        """As many as make up more than a gigabyte."""
        size = outputs * inner
        step = -(-size * self.itemsize // ALIGN) * ALIGN // self.itemsize
        count = max(2, min(-(-ROTATED_BYTES // (size * self.itemsize)), self._pool.size // step))
        scale = self._scale[:outputs] if self.dtype == "int8" else None
        return [Weight(self._pool[i * step : i * step + size].reshape(outputs, inner), self.dtype, scale) for i in range(count)]


def time_graph(device: Device, launches: Sequence[Callable[[], Any]], replays: int = 12) -> float:
    """Milliseconds of one launch: `launches` captured as one graph, the median over replays."""

    def step() -> None:
        for launch in launches:
            launch()

    graph = device.capture(step)
    return time_replays(device, graph.replay, replays) / len(launches)


def time_replays(device: Device, replay: Callable[[], Any], replays: int = 12) -> float:
    """Milliseconds of one call, the median; after WARM_SECONDS of calls, for an idle GPU clocks down and takes that to wake."""
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        replay()
        device.synchronize()
    times = []
    for _ in range(replays):
        start, end = device.event(), device.event()
        start.record()
        replay()
        end.record()
        times.append(device.elapsed_ms(start, end))
    return float(np.median(times))


def read_bandwidth(device: Device) -> float:
    """GB/s of a kernel that only reads, over more than a gigabyte: the most that memory gives."""
    from l1_kernels.sbi_gemm.read import make_read

    words: Array = device.xp.random.randint(0, 1 << 30, 1 << 24, dtype=np.uint32)
    words = device.xp.tile(words, 32)  # 2.1 GB
    best = 0.0
    for blocks, threads in ((132 * 4, 512), (132 * 8, 256), (132 * 2, 1024), (132 * 16, 256)):
        out = device.zeros(blocks * threads, np.uint32)
        milliseconds = time_graph(device, [partial(_launch, device, make_read(), blocks, threads, words, out)])
        best = max(best, words.nbytes / milliseconds / 1e6)
    return best


def _launch(device: Device, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
    kernels: Any = device.kernels
    kernels.launch(kernel, blocks, threads, 0, *arguments)
