"""Shared and local arrays, which start as poison, and atomic operations.

Poison is NaN in floats, all ones in unsigned integers (a NaN too where they carry the bits of 16-bit floats) and the smallest
number in signed ones (an index that no array has). Dynamic shared memory is bytes of all ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from l1_kernels.simulator.errors import SimulatorError
from l1_kernels.simulator.scheduler import Thread, poll, running

STATIC_SHARED_BYTES = 48 * 1024  # ptxas refuses more
DYNAMIC_SHARED_BYTES = 227 * 1024  # of one block on compute capability 9.0


def dtype_of(dtype: Any) -> np.dtype:
    """A NumPy dtype from one, a NumPy scalar type, or a numba type (whose name is NumPy's)."""
    try:
        return np.dtype(dtype)
    except TypeError:
        return np.dtype(str(dtype))


def poison(dtype: np.dtype) -> Any:
    """The value that an unwritten element has."""
    if dtype.kind == "f":
        return np.nan
    if dtype.kind == "u":
        return np.iinfo(dtype).max
    if dtype.kind == "i":
        return np.iinfo(dtype).min
    if dtype.kind == "b":
        return True
    raise SimulatorError(f"no array of dtype {dtype} in shared or local memory")


class shared:  # noqa: N801 (the name that kernels use)
    """cuda.shared"""

    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        """One array for the block, the same at the same line of the kernel; shape 0 is the launch's dynamic memory.
        All start at a multiple of 16, as NumPy's do; a GPU's do so only where `alignment`, 16, asks for it."""
        launch = running()
        thread: Thread = launch.current
        block = thread.block
        kind = dtype_of(dtype)
        if shape == 0:
            if block.dynamic is None:
                block.dynamic = np.full(launch.dynamic_bytes, 0xFF, np.uint8)
            return block.dynamic[: launch.dynamic_bytes // kind.itemsize * kind.itemsize].view(kind)
        frame = sys._getframe(1)
        # Every jitted function has a code object of its own, so two that one factory made have two arrays.
        key = (id(frame.f_code), frame.f_lasti)
        array = block.shared.get(key)
        if array is None:
            array = block.shared[key] = np.full(shape, poison(kind), kind)
            block.shared_bytes += array.nbytes
            if block.shared_bytes > STATIC_SHARED_BYTES:
                raise SimulatorError(f"{block.shared_bytes} bytes of static shared memory; a block has {STATIC_SHARED_BYTES}")
        return array


class local:  # noqa: N801
    """cuda.local"""

    @staticmethod
    def array(shape: Any, dtype: Any) -> np.ndarray:
        """An array of the thread's own."""
        kind = dtype_of(dtype)
        return np.full(shape, poison(kind), kind)


class const:  # noqa: N801
    """cuda.const"""

    @staticmethod
    def array_like(array: np.ndarray) -> np.ndarray:
        return array


def read_modify_write(array: np.ndarray, index: Any, change: Callable[[Any], Any]) -> Any:
    """Atomically array[index] = change(array[index]); the old value. One that changes nothing may be a thread that polls."""
    old = array[index]
    new = change(old)
    array[index] = new
    if array[index] == old:
        return poll(("atomic", id(array), index), old, lambda: _again(array, index, change), depth=3)
    running().current.polled = None
    return old


def _again(array: np.ndarray, index: Any, change: Callable[[Any], Any]) -> Any:
    old = array[index]
    array[index] = change(old)
    return old


def _fmax(old: Any, value: Any) -> Any:
    return value if value > old or old != old else old


def _fmin(old: Any, value: Any) -> Any:
    return value if value < old or old != old else old


class atomic:  # noqa: N801
    """cuda.atomic: each gives the value that stood there before."""

    @staticmethod
    def add(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: old + old.dtype.type(value))

    @staticmethod
    def sub(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: old - old.dtype.type(value))

    @staticmethod
    def and_(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: old & old.dtype.type(value))

    @staticmethod
    def or_(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: old | old.dtype.type(value))

    @staticmethod
    def xor(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: old ^ old.dtype.type(value))

    @staticmethod
    def inc(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: 0 if old >= value else old + old.dtype.type(1))

    @staticmethod
    def dec(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: value if old == 0 or old > value else old - old.dtype.type(1))

    @staticmethod
    def exch(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: value)

    @staticmethod
    def max(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: value if value > old else old)

    @staticmethod
    def min(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: value if value < old else old)

    @staticmethod
    def nanmax(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: _fmax(old, value))

    @staticmethod
    def nanmin(array: np.ndarray, index: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda old: _fmin(old, value))

    @staticmethod
    def cas(array: np.ndarray, index: Any, old: Any, value: Any) -> Any:
        return read_modify_write(array, index, lambda now: value if now == old else now)

    @staticmethod
    def compare_and_swap(array: np.ndarray, old: Any, value: Any) -> Any:
        return read_modify_write(array, 0, lambda now: value if now == old else now)
