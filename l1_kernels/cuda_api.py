"""The one door to CUDA: everything in the project that writes or launches a kernel imports `cuda` from here.

`cuda` is numba.cuda, or, where NUMBA_ENABLE_CUDASIM=1 stands in the environment at the first import, our own simulator of it
(l1_kernels/simulator). Both offer the same names, so a kernel is written once:

    from l1_kernels.cuda_api import cuda, math

    @cuda.jit
    def scale(x, factor): ...

    scale[blocks, threads, stream](x, np.float32(2))

`math` is Python's module on a GPU, where numba compiles it, and on the simulator a twin with a device's arithmetic: exp(1000) is
infinity there, not an OverflowError, and a float32 gives a float32.

`SIMULATED` says which of the two it is. `intrinsic` and `types` are numba's, for inline_ptx.py alone; the simulator has none.
`as_if_on` and `lowered` are compile_ptx.py's. numba-cuda is in maintenance mode: a move to its successor changes this file and inline_ptx.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

cuda: Any
math: Any
intrinsic: Any = None
types: Any = None

if SIMULATED:
    from l1_kernels.simulator import api as cuda
    from l1_kernels.simulator import device_math as math
else:
    # A kernel that is given a CuPy array would otherwise wait for its stream, which a graph capture does not survive;
    # small launches are the rule in decoding, so numba's warnings about them say nothing.
    os.environ.setdefault("NUMBA_CUDA_ARRAY_INTERFACE_SYNC", "0")
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
    import math

    from numba import cuda, types
    from numba.cuda.extending import intrinsic


@contextlib.contextmanager
def as_if_on(capability: tuple[int, int]) -> Iterator[None]:
    """Compile device functions for compute capability (major, minor): numba would ask the GPU, and there may be none."""
    from numba.cuda import dispatcher

    ask = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = ask


def lowered(function: Any, signature: Any, capability: tuple[int, int], **options: Any) -> Callable[[tuple[int, int]], str]:
    """A kernel typed and lowered once, which is most of the work; what is returned makes its PTX for a compute capability from
    `capability` on. numba lowers alike for all of them from 7.5 on; `cuda.compile` would begin anew for each. options: fastmath, launch_bounds."""
    from numba.cuda import compiler

    half: Any = compiler  # the half of `cuda.compile` that it has no name for
    with as_if_on(capability):
        library, _ = half._compile_pyfunc_with_fixup(function, signature, device=False, cc=capability, abi="numba", **options)
    return lambda capability: library.get_asm_str(cc=capability)


def early(alone: str = "") -> Callable[[Any], Any]:
    """Decorates a kernel that calls ptx.take_turn before it touches what the launch before writes: it may begin while that one still runs
    (quick_launch.py). The name in the field: programmatic dependent launch. alone: not after a kernel of the same mark, which writes what this
    one reads while it waits."""

    def decorate(kernel: Any) -> Any:
        kernel.starts_early, kernel.not_after = True, alone
        return kernel

    return decorate


def at_most(threads: int) -> Callable[[Any], Any]:
    """Decorates a kernel whose blocks have at most so many threads, where @cuda.jit's `launch_bounds`, which make it other code, do not say so: how many
    registers it may take follows (compile_ptx.py), and the simulator refuses a larger block."""

    def decorate(kernel: Any) -> Any:
        kernel.most_threads = threads
        return kernel

    return decorate


_allowed: dict[int, int] = {}


def allow_shared(kernel: Any, signature: tuple[Any, ...], size: int) -> None:
    """Let `kernel`, for arguments of these types, be launched with `size` bytes of dynamic shared memory (48 KiB need no leave)."""
    if SIMULATED or _allowed.get(id(kernel), 0) >= size:
        return
    kernel.compile(signature)
    for compiled in kernel.overloads.values():
        allow_shared_of(int(compiled._codelibrary.get_cufunc().kernel.handle), size)
    _allowed[id(kernel)] = size


def allow_shared_of(handle: int, size: int) -> None:
    """The same of compiled code, by the driver's handle of it."""
    from cuda.bindings import driver

    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(limit, size, driver.CUkernel(handle), driver.CUdevice(cuda.get_current_device().id))
    if int(status):
        raise RuntimeError(f"{size} bytes of shared memory refused: {status}")


__all__ = ["SIMULATED", "allow_shared", "allow_shared_of", "as_if_on", "at_most", "cuda", "early", "intrinsic", "lowered", "math", "types"]
