from __future__ import annotations

import numpy as np
import pytest

from l1_kernels.device import Device
from l1_kernels.step.kernel import LEAST_CAPABILITY
from tests.l1_kernels.step_checks import Shape, check_step, step_regions

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def able(gpu: Device) -> None:
    import cupy

    if int(cupy.cuda.Device(gpu.index).compute_capability) < int(LEAST_CAPABILITY):
        pytest.skip(f"the step kernel needs compute capability {LEAST_CAPABILITY}")


def multiprocessors(device: Device) -> int:
    regions: object = device.regions
    return regions.multiprocessors  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 16])
@pytest.mark.parametrize("parallel", [False, True])
def test_layers(device: Device, dtype: str, num_tokens: int, parallel: bool) -> None:
    lengths = tuple(int(n) for n in np.random.default_rng().integers(0, 199, num_tokens))
    shape = Shape(heads=25, kv_heads=25, head_dim=64, size=1600, width=6400, lengths=lengths, places=256, outputs=1999, rotated=32, parallel=parallel)
    check_step(device, dtype, shape, multiprocessors(device))


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_wide_layers(device: Device, dtype: str, num_tokens: int) -> None:
    """GPT-J's: x of 16 tokens in segments."""
    shape = Shape(
        heads=16, kv_heads=16, head_dim=256, size=4096, width=16384, lengths=tuple(range(130, 130 + num_tokens)), places=160, rotated=64,
        interleaved=True, parallel=True, bias=False, layers=1,
    )  # fmt: skip
    check_step(device, dtype, shape, multiprocessors(device))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("lengths", [(1,), (5000,), (8191, 77), (700,) * 11])
def test_llama_with_long_contexts(device: Device, dtype: str, lengths: tuple[int, ...]) -> None:
    shape = Shape(
        heads=32, kv_heads=8, head_dim=128, size=1024, width=2816, lengths=lengths, places=8192, norm="rmsnorm", kind="silu", gated=True,
        bias=False, rotated=128, layers=1,
    )  # fmt: skip
    check_step(device, dtype, shape, multiprocessors(device))


@pytest.mark.parametrize("shape", [
    Shape(size=80, width=208, heads=1, kv_heads=1, head_dim=72, rotated=24, interleaved=True, outputs=199),
    Shape(size=48, width=16, heads=3, kv_heads=1, head_dim=8, rotated=0, alibi=True, outputs=7),
    Shape(size=272, width=336, heads=2, kv_heads=1, head_dim=136, kind="relu", window=3, places=37, lengths=(36, 1)),
])  # fmt: skip
def test_awkward_shapes(device: Device, shape: Shape) -> None:
    check_step(device, "fp16", shape, multiprocessors(device))


def test_few_blocks_many_times(device: Device) -> None:
    """The barrier's counter comes round, whatever the grid; nothing of a launch is left for the next."""
    for blocks in (1, 2, 37):
        regions = step_regions(device, blocks)
        assert regions.launched == 0
        for _ in range(3):
            check_step(device, "fp16", Shape(lengths=(5, 150), places=160), blocks)
