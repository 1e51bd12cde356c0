"""What only a GPU has: streams that overlap, pinned memory, graphs of kernels from CuPy, cuBLAS and numba together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from l1_kernels.device import Device, open_device
from l1_kernels.errors import UserError
from l1_kernels.weight import host_weight

pytestmark = pytest.mark.gpu


def test_description_and_memory(gpu: Device) -> None:
    assert gpu.name == "cuda" and gpu.description
    free, total = gpu.memory()
    assert 0 < free <= total
    held = gpu.empty(1 << 26, np.uint8)
    del held  # back in the pool, which counts as free
    assert gpu.memory()[0] > free - (1 << 25)


def test_copies_there_and_back(gpu: Device) -> None:
    host = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert (gpu.to_host(gpu.to_device(host.T)) == host.T).all() and gpu.to_device(host.T).flags.c_contiguous
    pinned = gpu.pinned((3, 4), np.uint16)
    pinned[...] = host
    assert (gpu.to_host(gpu.to_device(pinned)) == host).all()
    assert gpu.to_host(gpu.zeros((2, 5), np.int32)).sum() == 0


def test_a_gpu_that_is_not_there(gpu: Device) -> None:
    with pytest.raises(UserError, match="GPU 99 asked for"):
        open_device("cuda", 99)


def test_events_time_a_stream(gpu: Device) -> None:
    start, end = gpu.event(), gpu.event()
    x, weight = gpu.zeros((64, 2048)), gpu.weight(host_weight(np.ones((2048, 2048), np.float32), "fp16"))
    with gpu.stream() as stream:
        start.record(stream)
        gpu.kernels.linear(x, weight)
        end.record(stream)
    assert gpu.elapsed_ms(start, end) > 0


@pytest.mark.parametrize("num_tokens", [3, 40])  # the skinny kernel; cuBLAS
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_graph_replays_on_new_numbers(gpu: Device, dtype: str, num_tokens: int) -> None:
    """numba's and CuPy's own kernels in one graph; between replays others allocate and write, and must do no harm."""
    rng = np.random.default_rng()
    weight = gpu.weight(host_weight(rng.standard_normal((96, 64)).astype(np.float32), dtype))
    bias, norm = (gpu.to_device(rng.standard_normal(n).astype(np.float32)) for n in (96, 64))
    x = gpu.zeros((num_tokens, 64))

    def step() -> Any:
        hidden = gpu.kernels.rms_norm(x, norm, 1e-6)
        return gpu.kernels.activate(gpu.kernels.linear(hidden, weight, bias), "silu") * 2

    graph = gpu.capture(step)
    results = []
    for _ in range(3):
        new = rng.standard_normal(x.shape).astype(np.float32)
        x[...] = gpu.to_device(new)
        other = [gpu.empty((num_tokens, n)) for n in (64, 96) for _ in range(4)]
        for array in other:
            array.fill(np.nan)
        got = gpu.to_host(graph.replay())
        # cuBLAS may choose another kernel inside a capture, where its scratch memory is ours: other orders of one sum.
        np.testing.assert_allclose(got, gpu.to_host(step()), rtol=1e-4, atol=1e-4)
        results.append(got)
    assert not np.array_equal(results[0], results[1])


def test_a_graph_on_a_stream_of_ones_own(gpu: Device) -> None:
    x, one = gpu.zeros(5), gpu.to_device(np.ones(5, np.float32))
    graph = gpu.capture(lambda: gpu.kernels.add(x, one))
    gpu.synchronize()
    x.fill(0)
    gpu.synchronize()
    with gpu.stream():
        for _ in range(10):
            graph.replay()
        assert (gpu.to_host(x) == 10).all()
