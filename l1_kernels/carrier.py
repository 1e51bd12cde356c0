"""How a kernel reads and writes numbers of each dtype: device functions between the carrier (weight.py) and float32.

A kernel factory takes `loader(dtype)` and `storer(dtype)` as closure constants, so one kernel text serves all dtypes.
Arithmetic is float32 throughout: numba has none for 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import ptx
from l1_kernels.cuda_api import cuda

FLOATS = ("fp32", "fp16", "bf16")
DTYPES = (*FLOATS, "int8")

_ELEMENT = {"fp32": types.float32, "fp16": types.uint16, "bf16": types.uint16, "int8": types.int8}


def array_type(dtype: str, ndim: int) -> types.Array:
    """numba's type of a C-contiguous carrier array, for the signatures that `variants` lists."""
    return types.Array(_ELEMENT[dtype], ndim, "C")


F32_1D, F32_2D, F32_3D = (types.Array(types.float32, ndim, "C") for ndim in (1, 2, 3))
I32_1D, I32_2D = (types.Array(types.int32, ndim, "C") for ndim in (1, 2))


@cache
def loader(dtype: str) -> Callable[..., Any]:
    """Carrier element -> float32 (int8: before its scale)."""
    if dtype == "fp32":
        return cuda.jit(device=True)(lambda number: number)
    if dtype == "int8":
        return cuda.jit(device=True)(lambda number: np.float32(number))
    convert = ptx.f16_to_f32 if dtype == "fp16" else ptx.bf16_to_f32
    return cuda.jit(device=True)(lambda bits: convert(bits))


@cache
def storer(dtype: str) -> Callable[..., Any]:
    """float32 -> carrier element, rounded to nearest even."""
    if dtype == "fp32":
        return cuda.jit(device=True)(lambda number: number)
    convert = ptx.f32_to_f16 if dtype == "fp16" else ptx.f32_to_bf16
    return cuda.jit(device=True)(lambda number: convert(number))


@cache
def rounder(dtype: str) -> Callable[..., Any]:
    """float32 -> the nearest number that `dtype` holds, as float32. int8 weights leave x as it is."""
    if dtype in ("fp32", "int8"):
        return cuda.jit(device=True)(lambda number: number)
    load, store = loader(dtype), storer(dtype)
    return cuda.jit(device=True)(lambda number: load(store(number)))
