"""Launches that begin early: the next one sees all that the one before wrote, launched and as a graph."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from l1_kernels import ptx
from l1_kernels.cuda_api import cuda, early
from l1_kernels.quick_launch import QuickLaunch

pytestmark = pytest.mark.gpu
SIZE, BLOCKS, THREADS, CHAIN = 1 << 20, 132, 256, 40


@early()
@cuda.jit
def shift(source, target, waste):
    """target[i] = source[i + 1] + 1, after as much idle work as there are numbers in `waste`: the last blocks end late."""
    ptx.take_turn()
    first, across = cuda.grid(1), cuda.gridsize(1)
    total = np.float32(0)
    for i in range(cuda.blockIdx.x * 50):
        total += waste[i % waste.size]
    for i in range(first, target.size, across):
        target[i] = source[(i + 1) % source.size] + np.float32(1) + total * np.float32(0)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_chain_of_launches(overlap: bool) -> None:
    if overlap and int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("launches overlap from compute capability 9.0 on")
    launch = QuickLaunch(overlap)
    start = np.random.default_rng().standard_normal(SIZE, dtype=np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        waste = cupy.ones(997, np.float32)
        numbers = [cupy.asarray(start), cupy.empty(SIZE, np.float32)]

        def chain() -> None:
            for i in range(CHAIN):
                launch(shift, BLOCKS, THREADS, (numbers[i & 1], numbers[1 - (i & 1)], waste))

        def check() -> None:
            want = start
            for _ in range(CHAIN):
                want = np.roll(want, -1) + np.float32(1)
            np.testing.assert_array_equal(cupy.asnumpy(numbers[0]), want)

        for _ in range(5):
            numbers[0].set(start)
            chain()
            check()
        stream.begin_capture()
        chain()
        graph = stream.end_capture()
        for _ in range(5):
            numbers[0].set(start)
            graph.launch(stream)
            check()
