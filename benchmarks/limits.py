"""What a GPU gives at best, measured in the run that a figure is of: bandwidth of reading and of copying, rate of fp16 products."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import numpy as np

from l1_kernels.device import Device
from l1_kernels.weight import Weight

COPY_BYTES = 1 << 30  # read, and as many written
SIDE = 8192  # of the square matrices of the product


def limits(device: Device, copy_bytes: int = COPY_BYTES) -> dict[str, float]:
    """{"read_gb_s", "copy_gb_s"}, 1e9 bytes a second; a copy's bytes count twice, once read and once written."""
    from models.speeds import read_bandwidth

    return {"read_gb_s": read_bandwidth(device) / 1e9, "copy_gb_s": copy_bandwidth(device, copy_bytes) / 1e9}


def copy_bandwidth(device: Device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes a second."""
    source, target = device.zeros(num_bytes // 4), device.zeros(num_bytes // 4)

    def copy() -> None:
        target[...] = source

    return 2e3 * source.nbytes / best_ms(device, copy)


def product_rate(device: Device, side: int = SIDE) -> float:
    """Operations a second of a square product in fp16, by the device's own `linear` (on a GPU cuBLAS, with x rounded first)."""
    rng = device.xp.random.default_rng(0)
    x = rng.standard_normal((side, side), dtype=np.float32)
    weight = Weight(x.astype(np.float16).view(np.uint16), "fp16")
    return 2e3 * side**3 / best_ms(device, partial(device.kernels.linear, x, weight))


def best_ms(device: Device, work: Any, repeats: int = 5) -> float:
    """Milliseconds of one call on the device, the best of `repeats`."""
    work()
    device.synchronize()
    return min(event_ms(device, work) for _ in range(repeats))


def median_ms(device: Device, work: Any, repeats: int = 11) -> float:
    """Milliseconds of one call on the device; the first two do not count."""
    return median([event_ms(device, work) for _ in range(repeats + 2)][2:])


def event_ms(device: Device, work: Any) -> float:
    start, end = device.event(), device.event()
    start.record()
    work()
    end.record()
    return device.elapsed_ms(start, end)
