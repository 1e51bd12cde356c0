"""Devices on a machine without a GPU: what opens, what is refused, and that the CPU path stays free of CUDA."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from l1_kernels import device as devices
from l1_kernels.device import open_device
from l1_kernels.errors import UserError
from l1_kernels.weight import host_weight


def in_python(code: str) -> str:
    """Standard output of a fresh interpreter, in which nothing is imported yet."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_cpu_arrays_and_kernels() -> None:
    cpu = open_device("cpu")
    assert cpu.name == "cpu" and cpu.xp is np and cpu.description
    x = cpu.to_device(np.ones((3, 4), np.float32, order="F"))
    assert x.flags.c_contiguous
    assert (cpu.zeros((2, 3), np.int32) == 0).all() and cpu.empty((2, 3)).dtype == np.float32
    weight = cpu.weight(host_weight(np.full((2, 4), 2, np.float32), "int8"))
    np.testing.assert_allclose(cpu.to_host(cpu.kernels.linear(x, weight)), 8, rtol=1e-6)
    free, total = cpu.memory()
    assert 0 < free <= total


def test_streams_events_and_graphs_keep_their_meaning_on_the_cpu() -> None:
    cpu = open_device("cpu")
    start, end = cpu.event(), cpu.event()
    start.record()
    with cpu.stream() as stream:
        stream.wait_event(start)
        end.record(stream)
    stream.synchronize()
    assert cpu.elapsed_ms(start, end) >= 0
    counter = cpu.zeros(1)

    def step() -> np.ndarray:
        return cpu.kernels.add(counter, np.ones(1, np.float32))

    graph = cpu.capture(step)
    assert counter[0] == 0
    assert graph.replay() is counter and graph.replay()[0] == 2
    assert cpu.pinned((2, 3), np.uint16).shape == (2, 3)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match="--device gpu: have cpu, cuda, sim, auto"):
        open_device("gpu")


def test_auto_takes_the_cpu_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_problem", lambda: "there is no NVIDIA GPU")
    assert open_device("auto").name == "cpu"
    with pytest.raises(UserError, match="--device cuda: there is no NVIDIA GPU; use --device cpu"):
        open_device("cuda")


def test_a_missing_package_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "cupy" else find(name, *rest))
    assert "CuPy is not installed" in str(devices.cuda_problem())


def test_sim_asked_for_too_late_is_refused() -> None:
    with pytest.raises(UserError, match="--device sim: .*NUMBA_ENABLE_CUDASIM=1"):
        open_device("sim")


def test_prepare_then_sim_runs_a_kernel() -> None:
    pytest.importorskip("greenlet")
    code = (
        "from l1_kernels.device import open_device, prepare; prepare('sim'); import numpy as np; d = open_device('sim');"
        "print(d.name, d.kernels.add(np.ones(3, np.float32), np.ones(3, np.float32)).tolist())"
    )
    assert in_python(code) == "sim [2.0, 2.0, 2.0]"


def test_the_cpu_path_imports_no_cuda() -> None:
    code = (
        "import sys; from l1_kernels.device import open_device, prepare; prepare('cpu'); import numpy as np; d = open_device('cpu');"
        "d.kernels.activate(np.ones((2, 3), np.float32), 'gelu'); d.capture(lambda: None).replay(); d.memory();"
        "print([m for m in sys.modules if m in ('cupy', 'numba.cuda', 'l1_kernels.cuda_api', 'mpi4py')])"
    )
    assert in_python(code) == "[]"
