"""A rung of the SBI-GeMM ladder against float64, for the simulator and the GPU."""

from __future__ import annotations

import numpy as np

from l1_kernels.device import Device
from l1_kernels.sbi_gemm import ladder
from l1_kernels.weight import decode, host_weight
from tests.l1_kernels.operation_checks import fresh, normal, poisoned, wide
from tests.l1_kernels.region_checks import ROUNDING


def check_rung(device: Device, rung: str, dtype: str, num_tokens: int, num_out: int, size: int) -> None:
    rng = fresh()
    host = host_weight(normal(rng, num_out, size), dtype)
    x = normal(rng, num_tokens, size)
    multiply = ladder.prepare(rung, device.kernels, device.weight(host))  # type: ignore[arg-type]
    y = device.to_host(poisoned(device, multiply, device.to_device(x)))
    w = wide(decode(host.data, host.dtype, host.scale))
    rounding = ROUNDING[dtype] if rung == "tensor" else 2e-6  # tensor cores take x in 16 bits
    error = np.abs(y - wide(x) @ w.T)
    assert (error <= rounding * (np.abs(wide(x)) @ np.abs(w).T) + 1e-6).all()
