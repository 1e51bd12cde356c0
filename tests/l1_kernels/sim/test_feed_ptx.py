"""What the simulator makes of the step kernel's instructions, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import types

from l1_kernels import feed_ptx
from l1_kernels.cuda_api import cuda
from l1_kernels.simulator.errors import DeadlockError, SimulatorError

pytestmark = pytest.mark.sim
WARPS = 2


@cuda.jit
def pass_on(source, count, out):
    """A warp copies, `count` threads are awaited, another warp reads."""
    shared = cuda.shared.array(0, types.uint32)
    base = feed_ptx.shared_address(shared, 0)
    thread = cuda.threadIdx.x
    if thread == 0:
        feed_ptx.barrier_init(np.uint32(base), np.uint32(count))
    cuda.syncthreads()
    if thread < 32:
        feed_ptx.copy16(np.uint32(base + 16 + thread * 16), source + thread * 16)
        feed_ptx.barrier_arrive_copied(np.uint32(base))
    else:
        while feed_ptx.barrier_passed(np.uint32(base), np.uint32(0)) == 0:
            pass
        words = feed_ptx.load16_shared_at(np.uint32(base + 16 + (63 - thread) * 16))
        for i in range(4):
            out[thread - 32, i] = words[i]
    feed_ptx.named_barrier(1, 64)


def launch(kernel: Callable[..., Any], shared_bytes: int, *arguments: Any) -> None:
    kernel[1, 32 * WARPS, 0, shared_bytes](*arguments)  # type: ignore[index]


def test_copies_are_there_when_the_barrier_is_passed() -> None:
    source, out = np.random.default_rng().integers(0, 1 << 32, (32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    launch(pass_on, 16 + 32 * 16, source.ctypes.data, 32, out)
    assert np.array_equal(out, source[::-1])


def test_a_barrier_with_too_high_a_count_is_never_passed() -> None:
    source, out = np.ones((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    with pytest.raises(DeadlockError):
        launch(pass_on, 16 + 32 * 16, source.ctypes.data, 33, out)


@pytest.mark.parametrize(("shared_bytes", "shift", "error"), [(16 + 31 * 16, 0, IndexError), (16 + 32 * 16, 4, ValueError)])
def test_copies_outside_and_misaligned(shared_bytes: int, shift: int, error: type[Exception]) -> None:
    source, out = np.ones((40, 4), np.uint32), np.zeros((32, 4), np.uint32)
    with pytest.raises(error):
        launch(pass_on, shared_bytes, source.ctypes.data + shift, 32, out)


@cuda.jit
def half_of_the_block():
    if cuda.threadIdx.x < 32:
        feed_ptx.named_barrier(1, 64)


def test_part_of_a_block_that_waits_for_nobody() -> None:
    with pytest.raises((DeadlockError, SimulatorError)):
        launch(half_of_the_block, 16)
