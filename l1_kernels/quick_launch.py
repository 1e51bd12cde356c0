"""Launches a numba kernel on CuPy arrays by the driver's own call, without numba's handling of arguments.

numba looks at every argument anew at each launch; here a kernel's compiled code and the form of its argument block are
looked up once for each combination of argument types, and a launch packs the numbers and calls cuLaunchKernel.

An argument block, as numba's compiler lays it out: an array is nine words or so (meminfo 0, parent 0, size, itemsize,
address, shape, strides in bytes), a scalar is itself. Each is handed over by the address of an 8-byte slot.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver as bindings
from cupy_backends.cuda.api import driver
from numba import types

from l1_kernels.cuda_api import allow_shared_of
from l1_kernels.weight import Array

_SCALARS = {
    bool: (types.boolean, "?7x"),
    int: (types.int64, "q"),
    float: (types.float64, "d"),
    np.float32: (types.float32, "f4x"),
    np.int32: (types.int32, "i4x"),
    np.int64: (types.int64, "q"),
    np.bool_: (types.boolean, "?7x"),
}
_NUMBA_TYPE = {"f": types.float32, "H": types.uint16, "b": types.int8, "i": types.int32, "l": types.int64, "q": types.int64, "L": types.uint64, "I": types.uint32}


class QuickLaunch:
    """launch(kernel, grid, block, arguments, shared): on CuPy's current stream. `count`: launches so far.

    overlap   a kernel that says it may (cuda_api.early) begins while the launch before it still runs, in a graph too: its start and its first
              loads of weights are over when that one ends. From compute capability 9.0 on
    """

    def __init__(self, overlap: bool = False) -> None:
        self._blocks: dict[Any, _ArgumentBlock] = {}
        self.count = 0
        self._early = _Early() if overlap else None
        self._last: Any = None

    def __call__(self, kernel: Any, grid: int | tuple[int, ...], block: int | tuple[int, ...], arguments: tuple[Any, ...], shared: int = 0) -> None:
        """arguments: C-contiguous CuPy arrays, bool, int, float, np.float32, np.int32."""
        key = (id(kernel), *[(a.dtype.char, a.ndim) if type(a) is cupy.ndarray else type(a) for a in arguments])
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = _ArgumentBlock(kernel, arguments)
        found.pack(arguments)
        if shared > found.shared_limit:
            allow_shared_of(found.function, shared)
            found.shared_limit = shared
        gx, gy, gz = _three(grid)
        bx, by, bz = _three(block)
        self.count += 1
        stream = cupy.cuda.get_current_stream().ptr
        last, self._last = self._last, kernel
        if self._early is not None and getattr(kernel, "starts_early", False) and not (kernel.not_after and kernel.not_after == getattr(last, "not_after", "")):
            self._early.launch(found, (gx, gy, gz, bx, by, bz), shared, stream)
        else:
            driver.launchKernel(found.function, gx, gy, gz, bx, by, bz, shared, stream, found.parameters, 0)


class _Early:
    """A launch with the attribute that lets it begin early."""

    def __init__(self) -> None:
        attribute = bindings.CUlaunchAttribute()
        attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = bindings.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        self._config = bindings.CUlaunchConfig()
        self._config.attrs, self._config.numAttrs = [attribute], 1

    def launch(self, found: _ArgumentBlock, sizes: tuple[int, ...], shared: int, stream: int) -> None:
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ = sizes
        config.sharedMemBytes, config.hStream = shared, bindings.CUstream(stream)
        (status,) = bindings.cuLaunchKernelEx(config, bindings.CUfunction(found.function), found.parameters, 0)
        if int(status):
            raise RuntimeError(f"a launch of {found.kernel.__name__} was refused: {status}")


class _ArgumentBlock:
    """The compiled code of a kernel for arguments of given types, and the memory that its arguments are packed in.

    cuLaunchKernel copies the arguments before it returns, so one block serves launch after launch."""

    def __init__(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        self.kernel = kernel  # kept: its id names this block
        form = ""
        signature: list[Any] = []
        for argument in arguments:
            if isinstance(argument, cupy.ndarray):
                signature.append(types.Array(_NUMBA_TYPE[argument.dtype.char], argument.ndim, "C"))
                form += "q" * (5 + 2 * argument.ndim)
            else:
                numba_type, code = _SCALARS[type(argument)]
                signature.append(numba_type)
                form += code
        compiled = kernel.compile(tuple(signature))
        self.function = int(compiled._codelibrary.get_cufunc().kernel.handle)
        self.shared_limit = 48 * 1024  # bytes that a block gets without asking
        self._struct = struct.Struct("=" + form)
        assert self._struct.size % 8 == 0
        self._slots = (ctypes.c_int64 * (self._struct.size // 8))()
        base = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_void_p * len(self._slots))(*(base + 8 * i for i in range(len(self._slots))))
        self.parameters = ctypes.addressof(self._pointers)

    def pack(self, arguments: tuple[Any, ...]) -> None:
        words: list[Any] = []
        for argument in arguments:
            if type(argument) is cupy.ndarray:
                _require_contiguous(argument)
                size, item, dimensions = argument.size, argument.itemsize, argument.ndim
                # What CuPy would be asked for, and would make a tuple of, follows from the rest for most arrays.
                if dimensions == 1:
                    words += (0, 0, size, item, argument.data.ptr, size, item)
                elif dimensions == 2:
                    rows, width = argument.shape
                    words += (0, 0, size, item, argument.data.ptr, rows, width, width * item, item)
                else:
                    words += (0, 0, size, item, argument.data.ptr, *argument.shape, *argument.strides)
            else:
                words.append(argument)
        self._struct.pack_into(self._slots, 0, *words)


def _require_contiguous(array: Array) -> None:
    if not array._c_contiguous:
        raise ValueError(f"argument of shape {array.shape} must be C-contiguous")


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    if isinstance(size, int):
        return size, 1, 1
    x, y, z = (*size, 1, 1)[:3]
    return x, y, z
