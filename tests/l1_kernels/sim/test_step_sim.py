from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.gpu_kernels import GpuKernels
from l1_kernels.step.recorder import StepRegions
from tests.l1_kernels.step_checks import Shape, check_step

pytestmark = pytest.mark.sim
WARPS = 2  # of 15 on a GPU: a stage is 128 numbers wide
LLAMA = dict(norm="rmsnorm", kind="silu", gated=True, bias=False, heads=6, kv_heads=2, rotated=16)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("lengths", [(5,), (0, 3, 7), (1, 2, 3, 4, 5, 6, 7, 0, 3)])
@pytest.mark.parametrize("parallel", [False, True])
def test_layers(device: Device, dtype: str, lengths: tuple[int, ...], parallel: bool) -> None:
    """More than 8 tokens: both halves of the tensor cores' 16 rows; WARPS = 3 for their 72 sums."""
    check_step(device, dtype, Shape(lengths=lengths, parallel=parallel, layers=1 + (len(lengths) == 1)), 3, 3 if len(lengths) > 8 else WARPS)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_gated_with_few_key_heads(device: Device, dtype: str) -> None:
    check_step(device, dtype, Shape(lengths=(6, 2), **LLAMA), 2, WARPS)


@pytest.mark.parametrize("shape", [
    Shape(size=80, width=208, heads=1, kv_heads=1, head_dim=72, rotated=24, interleaved=True, outputs=199),
    Shape(size=48, width=16, heads=3, kv_heads=1, head_dim=8, rotated=0, alibi=True, outputs=7),
    Shape(size=272, width=336, heads=2, kv_heads=1, head_dim=136, kind="relu", window=3, places=37, lengths=(36, 1)),
    Shape(parallel=True, own_norms=True, kind="gelu", lengths=(4, 4)),
])  # fmt: skip
def test_awkward_shapes(device: Device, shape: Shape) -> None:
    check_step(device, "fp16", shape, 3, WARPS)


@pytest.mark.parametrize("lengths", [(199,), (300, 130)])
def test_long_contexts_in_stretches(device: Device, lengths: tuple[int, ...]) -> None:
    check_step(device, "fp16", Shape(lengths=lengths, places=320, heads=1, kv_heads=1, layers=1), 7, WARPS)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("parallel", [False, True])
def test_x_in_segments(device: Device, dtype: str, parallel: bool) -> None:
    """Shared memory for less of x than K numbers: sums of several segments are kept."""
    shape = Shape(lengths=(3, 1), size=64, width=656, layers=1, parallel=parallel)
    check_step(device, dtype, shape, 3, WARPS, shared=512 + 128 + 4 * 8 * (256 + 64) + 2 * (2 * 128 + 64) + 1500)


def test_counters_are_not_in_a_graphs_pool() -> None:
    """What a graph allocates goes with it, so what the next one counts in must come from elsewhere."""
    made: list[tuple[int, ...]] = []

    def lasting(host: np.ndarray) -> np.ndarray:
        made.append(host.shape)
        return host.copy()

    kernels = GpuKernels(np.empty, lasting=lasting)
    assert kernels.zero_counts() is kernels.zero_counts()
    regions = StepRegions(kernels, FusedRegions(kernels, 5), 5, np.ascontiguousarray, WARPS)
    kept = regions._shared_arrays()
    assert len(made) == 3 and sorted(made)[:2] == [(1,), (5,)] and not kept.counter.any() and not kept.arrivals.any()
