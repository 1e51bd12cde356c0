"""Where a model runs: its arrays, its kernels, its streams. One path of model code over three devices.

    cpu    NumPy arrays, NumPy/BLAS and numba CPU kernels
    cuda   CuPy arrays, numba.cuda kernels and cuBLAS (cuda_device.py)
    sim    NumPy arrays, the same numba.cuda kernels in a simulator: no GPU needed, and a debugger steps through

Streams, events, pinned memory and graphs are real on `cuda`. On the host everything is done when a call returns, so there
they keep the same interface and do nothing: code that overlaps copies with kernels reads the same on a laptop.
Nothing here imports CuPy or numba.cuda until a device that needs them is opened.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from l1_kernels.errors import UserError
from l1_kernels.kernels import Kernels
from l1_kernels.regions import Regions, UnfusedRegions
from l1_kernels.weight import Array, Weight

NAMES = ("cpu", "cuda", "sim", "auto")
GEMMS = ("sbi", "cublas")
Result = TypeVar("Result")
Covariant = TypeVar("Covariant", covariant=True)


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Stream(Protocol):
    """An order of work. `with stream:` makes it the one that launches and copies go to."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: Any) -> Any: ...
    def synchronize(self) -> None: ...
    def record(self, event: Any = None) -> Any: ...
    def wait_event(self, event: Any) -> None: ...


class Graph(Protocol[Covariant]):
    """Recorded work. `replay` does it again on the current stream, over the same arrays, and returns the same result."""

    def replay(self) -> Covariant: ...


class Device(Protocol):
    """What the floors above know of the machine."""

    name: str  # "cpu" | "cuda" | "sim"
    description: str  # for people: "NVIDIA H200"
    index: int
    xp: Any  # numpy or cupy
    kernels: Kernels
    regions: Regions

    def to_device(self, host: np.ndarray) -> Array:
        """Host array -> C-contiguous array of the device. On cpu and sim it may be the same memory."""
        ...

    def to_host(self, array: Array) -> np.ndarray:
        """Array of the device -> host, after the current stream's work. On cpu and sim the same memory."""
        ...

    def weight(self, host: Weight) -> Weight:
        """A weight of the host -> the same on the device."""
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array: ...
    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array: ...

    def synchronize(self) -> None:
        """Waits for all work on the device; a kernel's fault shows here."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes. Free counts what the array pool holds and would hand out again."""
        ...

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...

    def current_stream(self) -> Stream:
        """The one that work goes to now."""
        ...

    def copy(self, to: Any, source: Any, stream: Stream) -> None:
        """to[...] = source, [n, rows, columns] whose rows and columns lie together, between page-locked host memory and the device's, on `stream` and in
        the background. On the host at once."""
        ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two recorded events (waits for the second)."""
        ...

    def pinned(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Page-locked host memory, which the GPU copies at full speed and in the background. Not initialised."""
        ...

    def mapped(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> tuple[np.ndarray, Array]:
        """Host memory that kernels write to directly: the same numbers as the host's array and as the device's. What a kernel
        wrote is there once an event recorded after it has passed."""
        ...

    def launches(self) -> int:
        """Kernels and graphs launched from Python so far."""
        ...

    def capture(self, step: Callable[[], Result]) -> Graph[Result]:
        """Records the work of `step` for replay. `step` is called twice on a GPU (the first call compiles and warms up),
        so it must give the same when repeated, must not wait for the device, and reads what changes from step to step
        out of arrays that the caller overwrites in place. On the host, replay calls `step`."""
        ...


class HostEvent:
    """The time at which it was recorded: on the host, work before it is done by then."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass


class HostStream:
    """The one order that the host works in."""

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record()
        return event

    def wait_event(self, event: HostEvent) -> None:
        pass


class HostGraph(Generic[Result]):
    def __init__(self, step: Callable[[], Result]) -> None:
        self._step = step

    def replay(self) -> Result:
        return self._step()


class HostDevice:
    """NumPy arrays in host memory: what cpu and sim share."""

    name: str
    index = 0
    xp: ModuleType = np

    def __init__(self, description: str, kernels: Kernels) -> None:
        self.description = description
        self.kernels = kernels
        self.regions: Regions = UnfusedRegions(kernels)

    def to_device(self, host: np.ndarray) -> Array:
        return np.ascontiguousarray(host)

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def weight(self, host: Weight) -> Weight:
        scale = None if host.scale is None else self.to_device(host.scale)
        return Weight(self.to_device(host.data), host.dtype, scale, host.act)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        return np.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        return np.zeros(shape, dtype)

    def synchronize(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return host_memory()

    def stream(self) -> Stream:
        return HostStream()

    def event(self) -> Event:
        return HostEvent()

    def current_stream(self) -> Stream:
        return HostStream()

    def copy(self, to: np.ndarray, source: np.ndarray, stream: Stream) -> None:
        to[...] = source

    def elapsed_ms(self, start: HostEvent, end: HostEvent) -> float:
        return (end.seconds - start.seconds) * 1e3

    def pinned(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return np.empty(shape, dtype)

    def mapped(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> tuple[np.ndarray, Array]:
        memory = np.zeros(shape, dtype)
        return memory, memory

    def launches(self) -> int:
        return getattr(self.kernels, "launches", 0)

    def capture(self, step: Callable[[], Result]) -> Graph[Result]:
        return HostGraph(step)


class CpuDevice(HostDevice):
    name = "cpu"

    def __init__(self) -> None:
        from l1_kernels.cpu_kernels import CpuKernels

        super().__init__(cpu_name(), CpuKernels())


class SimDevice(HostDevice):
    """The GPU's kernels, one thread at a time in Python. Thousands of times slower, and it explains itself."""

    name = "sim"

    def __init__(self, fused: bool = False) -> None:
        if not simulator_is_on():
            raise UserError("--device sim: the simulator is chosen when Python starts; set NUMBA_ENABLE_CUDASIM=1 in the environment")
        from l1_kernels.fused_regions import FusedRegions
        from l1_kernels.gpu_kernels import GpuKernels

        kernels = GpuKernels(self.empty)
        super().__init__("CUDA simulator", kernels)
        if fused:
            self.regions = FusedRegions(kernels, multiprocessors=2)


def prepare(name: str) -> None:
    """Sets what is read when numba and cuda_api are imported. A command calls this first; where they are imported already
    it comes too late, and `open_device` says so."""
    if name == "sim":
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    if name != "cpu":
        # A kernel given a CuPy array would wait for its stream at every launch, and could not be captured.
        os.environ["NUMBA_CUDA_ARRAY_INTERFACE_SYNC"] = "0"
        os.environ["NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS"] = "0"  # a decode step is small and knows it


def open_device(name: str, index: int = 0, fused: bool | None = None, gemm: str = "sbi", overlap: bool = True) -> Device:
    """name "cpu", "cuda", "sim", or "auto": cuda where a usable GPU is, else cpu. `index` picks a GPU among the visible.

    fused   whether layers run as fused regions (regions.py), or as the baseline: a launch an operation, products by cuBLAS.
            None: on a GPU they do, on the simulator, where a fused kernel takes longer to read and to run, they do not; the CPU has none
    overlap whether a launch may begin while the one before it runs (cuda_api.early; from compute capability 9.0 on)
    gemm    "sbi": SBI-GeMM for up to 16 tokens; "cublas": cuBLAS inside the fused regions (Fig 10a's middle step). A GPU's only

    Raises UserError where the device cannot be had, with the reason.
    """
    if name not in NAMES:
        raise UserError(f"--device {name}: have {', '.join(NAMES)}")
    if gemm not in GEMMS:
        raise ValueError(f"argument gemm must be one of {', '.join(GEMMS)}, got {gemm!r}")
    if name == "auto":
        name = "cpu" if cuda_problem() else "cuda"
    if name == "cpu":
        return CpuDevice()
    if name == "sim":
        return SimDevice(bool(fused))
    problem = cuda_problem()
    if problem:
        raise UserError(f"--device cuda: {problem}; use --device cpu")
    from l1_kernels.cuda_device import CudaDevice

    return CudaDevice(index, fused is not False, gemm, overlap)


def cuda_problem() -> str | None:
    """Why no GPU can be used here, in a few words, or None. Imports CuPy only where it is installed."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        return "NUMBA_ENABLE_CUDASIM is set, which puts the simulator in the GPU's place"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (the extra cuda12 or cuda13 brings it)"
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed (the extra cuda12 or cuda13 brings it)"
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "there is no NVIDIA GPU"
        cupy.cuda.cublas  # noqa: B018 (looks the library up: CuPy's wheel brings none)
    except Exception as error:  # a missing driver or library shows as one of many types
        return f"CuPy finds no usable GPU ({_one_line(error)})"
    try:
        from l1_kernels.cuda_api import cuda

        return None if cuda.is_available() else "numba-cuda finds no usable GPU"
    except Exception as error:
        return f"numba-cuda does not import ({_one_line(error)})"


def simulator_is_on() -> bool:
    """Whether this process's kernels run in the simulator (decided when cuda_api was first imported)."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        return False
    from l1_kernels.cuda_api import SIMULATED

    return SIMULATED


def host_memory() -> tuple[int, int]:
    """(available, total) bytes of the machine's memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.endswith("kB")}
        return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    return available, total


def cpu_name() -> str:
    """The processor's name and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = sys.platform
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {cores} core{'s' if cores != 1 else ''}"


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
