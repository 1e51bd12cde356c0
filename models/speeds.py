"""What bounds a step, measured: bytes that it reads, and how fast memory and the link give them."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from l1_kernels.device import Device
from models.runner import Runner

SUM_BYTES = (1 << 30) + (1 << 26)  # read by the bandwidth test: more than 1 GB, so that no cache holds it
LINK_BYTES = 64 << 20  # of a copy that measures the link


def bytes_read(runner: Runner, batch: int) -> int:
    """Bytes of weights that this rank reads in a step of `batch` tokens: every matrix once. A table is read a row a token,
    unless it is the head too; of the experts, those that so many tokens choose if their choices are spread evenly."""
    config = runner.config
    layers = [runner.weights.layer(index) for index in range(len(runner.blocks))]
    total = 0.0
    for layer in layers:
        matrices = [layer.qkv, layer.attn_out, layer.ffn_up, layer.ffn_down]
        if layer.moe is not None:
            matrices += [layer.moe.shared_up, layer.moe.shared_down]
            assert config.moe is not None
            touched = 1 - (1 - config.moe.top_k / config.moe.num_experts) ** batch
            total += touched * (layer.moe.up.weight.nbytes + layer.moe.down.weight.nbytes) + layer.moe.gate.nbytes
        total += sum(matrix.weight.nbytes for matrix in matrices if matrix is not None)
    ends = runner.head.weights
    matrices = [ends.project_in] if runner.stage.is_first else []
    matrices += [ends.head, ends.project_out] if runner.stage.is_last else []  # a tied table lies on the first stage too, and is not read there
    return round(total) + sum(matrix.weight.nbytes for matrix in matrices if matrix is not None)


def read_bandwidth(device: Device, repeats: int = 5) -> float:
    """Bytes a second of a read-only sum over SUM_BYTES in the device's memory, the best of `repeats`."""
    if device.name == "cuda":
        data = device.zeros(SUM_BYTES // 4)
        data.sum()
        device.synchronize()
        start, end = device.event(), device.event()
        best = float("inf")
        for _ in range(repeats):
            start.record()
            data.sum()
            end.record()
            best = min(best, device.elapsed_ms(start, end) / 1e3)
        return SUM_BYTES / best
    return host_read_bandwidth(repeats)


def host_read_bandwidth(repeats: int) -> float:
    """The same in host memory, on as many threads as numba may use."""
    threads = int(os.environ.get("NUMBA_NUM_THREADS", "1"))
    data = np.ones(SUM_BYTES // 8)  # ones, not zeros: zero pages may be one page
    parts = np.array_split(data, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = min(best, time.perf_counter() - start)
    return SUM_BYTES / best


def link_speed(device: Device) -> float:
    """Bytes a second from page-locked host memory to the device's, the best of three copies."""
    stream = device.stream()
    shape = (1, LINK_BYTES >> 14, 1 << 14)
    there: Any = device.pinned(shape, np.uint8)
    there[...] = 1
    here = device.zeros(shape, np.uint8)
    device.synchronize()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        device.copy(here, there, stream)
        stream.synchronize()
        best = min(best, time.perf_counter() - start)
    return LINK_BYTES / best
