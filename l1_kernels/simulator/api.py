"""The names of numba.cuda, for kernels and for those who launch them (`cuda_api` hands this module out as `cuda`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels.simulator import scheduler
from l1_kernels.simulator.errors import SimulatorError
from l1_kernels.simulator.meeting import FULL_MASK, barrier, meet
from l1_kernels.simulator.memory import atomic, const, local, poison, shared
from l1_kernels.simulator.scheduler import Dim3, stand_back

__all__ = ["FULL_MASK", "atomic", "const", "local", "shared"]

threadIdx, blockIdx = scheduler.thread_index, scheduler.block_index  # noqa: N816
blockDim, gridDim = scheduler.block_dim, scheduler.grid_dim  # noqa: N816
warpsize = scheduler.WARP_SIZE

MAX_THREADS = 1024  # of a block
MAX_GRID_YZ = 65535  # blocks
ARGUMENTS = (np.ndarray, np.generic, int, float, complex, tuple)  # what a kernel can be given


def __getattr__(name: str) -> Any:
    if name == "laneid":
        return scheduler.running().current.lane
    raise AttributeError(f"the simulator has no cuda.{name}")


# Kernels and launches


class Kernel:
    """A kernel: `kernel[grid, block, stream, shared_bytes](*arguments)` runs it, and returns when it is done."""

    def __init__(self, function: Callable[..., Any], most_threads: int = MAX_THREADS) -> None:
        self.py_func = function
        self.most_threads = most_threads  # of a block; cuda_api.at_most sets it too
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        grid, block, *rest = configuration
        shared_bytes = int(rest[1]) if len(rest) > 1 else 0
        grid, block = _dim3(grid, "grid"), _dim3(block, "block")
        if block[0] * block[1] * block[2] > self.most_threads:
            raise ValueError(f"block: {block} is more than {self.most_threads} threads, the most of {self.__name__}")
        if max(grid[1:]) > MAX_GRID_YZ:
            raise ValueError(f"grid: {grid} is more than {MAX_GRID_YZ} in y or z")

        def launch(*arguments: Any) -> None:
            for position, argument in enumerate(arguments):
                if not isinstance(argument, ARGUMENTS):
                    raise TypeError(f"argument {position} of kernel {self.__name__} is a {type(argument).__name__}")
            scheduler.launch(self.py_func, grid, block, shared_bytes, arguments)

        return launch

    def __call__(self, *arguments: Any) -> Any:
        """Called from another kernel: as a device function."""
        scheduler.running()
        return self.py_func(*arguments)


def _dim3(size: Any, name: str) -> Dim3:
    numbers = (size,) if isinstance(size, int | np.integer) else tuple(size)
    if not 1 <= len(numbers) <= 3 or any(n < 1 for n in numbers):
        raise ValueError(f"{name}: {size} is not one to three positive numbers")
    x, y, z = (*(int(n) for n in numbers), 1, 1)[:3]
    return x, y, z


def jit(function: Any = None, device: bool = False, launch_bounds: Any = MAX_THREADS, **options: Any) -> Any:
    """@cuda.jit, with or without arguments. A device function stays a function; options (fastmath, ...) mean nothing here, but of
    `launch_bounds` a block's threads."""
    if not callable(function):  # @cuda.jit(...), perhaps with a signature
        return lambda f: jit(f, device, launch_bounds, **options)
    function.__code__ = function.__code__.replace()  # an identity of its own: see memory.shared
    if device:
        function.py_func = function
        return function
    return Kernel(function, launch_bounds[0] if isinstance(launch_bounds, tuple) else launch_bounds)


def is_available() -> bool:
    return True


def synchronize() -> None:
    """Launches return when they are done."""


# What a thread asks about itself


def grid(dimensions: int) -> Any:
    x = blockIdx.x * blockDim.x + threadIdx.x
    if dimensions == 1:
        return x
    y = blockIdx.y * blockDim.y + threadIdx.y
    if dimensions == 2:
        return x, y
    return x, y, blockIdx.z * blockDim.z + threadIdx.z


def gridsize(dimensions: int) -> Any:
    sizes = (gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z)
    return sizes[0] if dimensions == 1 else sizes[:dimensions]


def lanemask_lt() -> int:
    return (1 << scheduler.running().current.lane) - 1


# The block


def syncthreads() -> None:
    barrier("syncthreads", None, lambda values: None)


def syncthreads_count(predicate: Any) -> int:
    return barrier("syncthreads_count", bool(predicate), sum)


def syncthreads_and(predicate: Any) -> int:
    return barrier("syncthreads_and", bool(predicate), lambda values: int(all(values)))


def syncthreads_or(predicate: Any) -> int:
    return barrier("syncthreads_or", bool(predicate), lambda values: int(any(values)))


def threadfence() -> None:
    """Threads run one at a time: memory is always in order."""


threadfence_block = threadfence_system = threadfence


def nanosleep(nanoseconds: Any) -> None:
    stand_back()


# The warp


def _fetch(kind: str, mask: int, value: Any, argument: int, source: Callable[[int, int], int]) -> Any:
    """Every lane gets the value of lane source(lane, its argument); its own where that is outside the warp."""

    def exchange(values: dict[int, Any]) -> dict[int, Any]:
        results = {}
        for lane, (own, its_argument) in values.items():
            wanted = source(lane, its_argument)
            if not 0 <= wanted < 32:
                results[lane] = own
            elif wanted in values:
                results[lane] = values[wanted][0]
            else:  # a lane that takes no part: whatever stands in its register
                kind_of = np.asarray(own).dtype
                results[lane] = kind_of.type(poison(kind_of))
        return results

    return meet(kind, mask, (value, int(argument)), exchange, depth=3)


def shfl_sync(mask: int, value: Any, lane: int) -> Any:
    return _fetch("shfl_sync", mask, value, lane, lambda own, wanted: wanted % 32)


def shfl_up_sync(mask: int, value: Any, delta: int) -> Any:
    return _fetch("shfl_up_sync", mask, value, delta, lambda own, by: own - by)


def shfl_down_sync(mask: int, value: Any, delta: int) -> Any:
    return _fetch("shfl_down_sync", mask, value, delta, lambda own, by: own + by)


def shfl_xor_sync(mask: int, value: Any, bits: int) -> Any:
    return _fetch("shfl_xor_sync", mask, value, bits, lambda own, flip: own ^ flip)


def _vote(kind: str, mask: int, value: Any, decide: Callable[[dict[int, Any]], Any]) -> Any:
    return meet(kind, mask, value, lambda values: dict.fromkeys(values, decide(values)), depth=3)


def syncwarp(mask: int = FULL_MASK) -> None:
    _vote("syncwarp", mask, None, lambda values: None)


def all_sync(mask: int, predicate: Any) -> bool:
    return _vote("all_sync", mask, bool(predicate), lambda values: all(values.values()))


def any_sync(mask: int, predicate: Any) -> bool:
    return _vote("any_sync", mask, bool(predicate), lambda values: any(values.values()))


def eq_sync(mask: int, predicate: Any) -> bool:
    return _vote("eq_sync", mask, bool(predicate), lambda values: len(set(values.values())) == 1)


def ballot_sync(mask: int, predicate: Any) -> int:
    return _vote("ballot_sync", mask, bool(predicate), lambda values: sum(1 << lane for lane, yes in values.items() if yes))


def match_any_sync(mask: int, value: Any) -> int:
    """The lanes that hold the same value, as a mask."""

    def compute(values: dict[int, Any]) -> dict[int, int]:
        return {lane: sum(1 << other for other, theirs in values.items() if theirs == own) for lane, own in values.items()}

    return meet("match_any_sync", mask, value, compute)


def match_all_sync(mask: int, value: Any) -> tuple[int, bool]:
    """(mask, True) if all lanes hold the same value, else (0, False)."""

    def decide(values: dict[int, Any]) -> tuple[int, bool]:
        same = len(set(values.values())) == 1
        return (sum(1 << lane for lane in values) if same else 0), same

    return _vote("match_all_sync", mask, value, decide)


def activemask() -> int:
    raise SimulatorError("cuda.activemask says only who happens to run beside a lane: pass a mask that is known instead")


# Bits and numbers


def popc(x: Any) -> int:
    return (int(x) & _ones(x)).bit_count()


def clz(x: Any) -> int:
    return _width(x) - (int(x) & _ones(x)).bit_length()


def ffs(x: Any) -> int:
    """The place of the lowest bit that is set, counted from 1; 0 if none is."""
    bits = int(x) & _ones(x)
    return (bits & -bits).bit_length()


def brev(x: Any) -> int:
    width = _width(x)
    return int(f"{int(x) & _ones(x):0{width}b}"[::-1], 2)


def _width(x: Any) -> int:
    return x.dtype.itemsize * 8 if isinstance(x, np.integer) else 32


def _ones(x: Any) -> int:
    return (1 << _width(x)) - 1


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once (a float32's product is exact in float64)."""
    if type(a) is np.float32:
        return np.float32(float(a) * float(b) + float(c))
    return a * b + c


def cbrt(x: Any) -> Any:
    return np.cbrt(x)


def selp(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b
