"""An NVIDIA GPU: CuPy arrays, numba.cuda kernels, cuBLAS. CuPy's current stream orders the work of all three."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import cupy
import cupyx
import numba
import numpy as np

from l1_kernels.cuda_api import cuda
from l1_kernels.errors import UserError
from l1_kernels.fused_regions import FusedRegions
from l1_kernels.gpu_kernels import GpuKernels
from l1_kernels.kernels import Kernels
from l1_kernels.library_regions import LibraryKernels
from l1_kernels.linear.cublas import Gemm
from l1_kernels.quick_launch import QuickLaunch
from l1_kernels.regions import Regions, UnfusedRegions
from l1_kernels.sbi_gemm.job import MAX_TOKENS
from l1_kernels.sbi_gemm.plans import load_table
from l1_kernels.weight import Array, Weight

Result = TypeVar("Result")
OVERLAP_CAPABILITY = 90  # from which on a launch may begin while the one before it runs


class CudaDevice:
    """GPU `index` of those visible. It becomes the current device of CuPy and of numba in the calling thread, and a stream of
    its own becomes CuPy's current one."""

    name = "cuda"
    xp = cupy

    def __init__(self, index: int = 0, fused: bool = True, gemm: str = "sbi", overlap: bool = True) -> None:
        count = cupy.cuda.runtime.getDeviceCount()
        if index >= count:
            raise UserError(f"--device cuda: GPU {index} asked for, {count} can be seen; start fewer ranks or mend CUDA_VISIBLE_DEVICES")
        self.index = index
        # Read when numba was imported; a program that imported numba before `prepare` gets the same here.
        for config in _numba_configs():
            config.CUDA_ARRAY_INTERFACE_SYNC = 0
            config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
        cuda.select_device(index)
        self._device = cupy.cuda.Device(index)
        self._device.use()
        # An earlier device object's streams may still be at work. CuPy keeps freed memory by its stream's address, a new stream may be given
        # the address of a dead one, and then memory that such work still writes to.
        self._device.synchronize()
        self.description = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        self._numba_streams: dict[int, Any] = {0: 0}
        library = Gemm()
        self.overlaps = overlap = overlap and int(self._device.compute_capability) >= OVERLAP_CAPABILITY
        self._kernels = (GpuKernels if fused else LibraryKernels)(self.empty, self._numba_stream, library, QuickLaunch(overlap), self._upload)
        self.kernels: Kernels = self._kernels
        self.replays = 0
        # Everything goes to one stream of our own: the default stream would wait for all others, and they for it.
        self._main = cupy.cuda.Stream(non_blocking=True)
        self._main.use()
        self._side = cupy.cuda.Stream(non_blocking=True)
        multiprocessors = cupy.cuda.runtime.getDeviceProperties(index)["multiProcessorCount"]
        self.regions: Regions = UnfusedRegions(self._kernels)
        if fused:
            # norm_tokens 0: a step with the norm in every block takes longer (docs/decisions.md).
            self.regions = FusedRegions(
                self._kernels, multiprocessors, load_table(self.description), norm_tokens=0, gemm=library,
                most_tokens=MAX_TOKENS if gemm == "sbi" else 0,
            )  # fmt: skip

    def _numba_stream(self) -> Any:
        """numba's name for CuPy's current stream (0: the default one of both)."""
        pointer = cupy.cuda.get_current_stream().ptr
        if pointer not in self._numba_streams:
            self._numba_streams[pointer] = cuda.external_stream(pointer)
        return self._numba_streams[pointer]

    def _upload(self, host: np.ndarray) -> Array:
        """`to_device`, at once, outside of a capture that may be under way, and not in the pool of a graph, whose memory goes
        when the graph does."""
        # In the side stream's part of the pool: memory that the current stream gave back may still be in use by its work under way.
        with self._side, cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
            array = cupy.empty(host.shape, host.dtype)
            array.set(np.ascontiguousarray(host))
        self._side.synchronize()
        return array

    def to_device(self, host: np.ndarray) -> Array:
        return cupy.ascontiguousarray(cupy.asarray(host))

    def to_host(self, array: Array) -> np.ndarray:
        return cupy.asnumpy(array)

    def weight(self, host: Weight) -> Weight:
        scale = None if host.scale is None else self.to_device(host.scale)
        return Weight(self.to_device(host.data), host.dtype, scale, host.act)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        return cupy.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        return cupy.zeros(shape, dtype)

    def synchronize(self) -> None:
        self._device.synchronize()

    def memory(self) -> tuple[int, int]:
        free, total = self._device.mem_info
        return free + cupy.get_default_memory_pool().free_bytes(), total

    def stream(self) -> cupy.cuda.Stream:
        return cupy.cuda.Stream(non_blocking=True)

    def event(self) -> cupy.cuda.Event:
        return cupy.cuda.Event()

    def current_stream(self) -> cupy.cuda.Stream:
        return cupy.cuda.get_current_stream()

    def copy(self, to: Any, source: Any, stream: cupy.cuda.Stream) -> None:
        if to.shape != source.shape or to.dtype != source.dtype or to.ndim != 3:
            raise ValueError(f"copy: {source.dtype} {source.shape} to {to.dtype} {to.shape}")
        count, rows, columns = to.shape
        for array in (to, source):
            if array.strides[1:] != (columns * array.itemsize, array.itemsize):
                raise ValueError(f"copy: rows and columns must lie together, got strides {array.strides}")
        width = rows * columns * to.itemsize
        if width and count:
            cupy.cuda.runtime.memcpy2DAsync(
                _pointer(to), to.strides[0], _pointer(source), source.strides[0], width, count, cupy.cuda.runtime.memcpyDefault, stream.ptr
            )

    def elapsed_ms(self, start: cupy.cuda.Event, end: cupy.cuda.Event) -> float:
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end)

    def pinned(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return cupyx.empty_pinned(shape, dtype)

    def mapped(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> tuple[np.ndarray, Array]:
        host = cupyx.zeros_pinned(shape, dtype)  # page-locked memory has one address for both sides
        memory = cupy.cuda.UnownedMemory(host.ctypes.data, max(1, host.nbytes), host, self.index)
        return host, cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def launches(self) -> int:
        return self._kernels.launches + self.replays

    def capture(self, step: Callable[[], Result]) -> CudaGraph[Result]:
        return CudaGraph(step, self)


class CudaGraph(Generic[Result]):
    """A CUDA graph of everything `step` launched, through CuPy, cuBLAS and numba alike.

    Its arrays come from a memory pool of its own that lives as long as the graph: a replay writes to the addresses it
    was recorded with, so nobody else may be given them in between.
    """

    def __init__(self, step: Callable[[], Result], device: CudaDevice) -> None:
        self._device = device
        caller = cupy.cuda.get_current_stream()
        self._pool = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured
        self._stream.wait_event(caller.record())
        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            step()  # kernels compile and load here, which a capture does not allow; the pool grows to its size
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                self._result = step()
            finally:
                self._graph = self._stream.end_capture()

    def replay(self) -> Result:
        """Launches on the current stream. The result's arrays are the same each time, overwritten."""
        self._device.replays += 1
        self._graph.launch(cupy.cuda.get_current_stream())
        return self._result


def _pointer(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _numba_configs() -> list[Any]:
    """numba's settings, and numba-cuda's where it keeps its own."""
    separate = sys.modules.get("numba.cuda.core.config")
    return [numba.config] if separate is None else [numba.config, separate]
