"""x[i] += y[i];   y[t, n] += b[n];   bits[i] = round(x[i]);   x[i] = number(bits[i])

All float32 in global memory, `bits` uint16 (fp16 or bf16). Adding reads 8 bytes and writes 4 a number, rounding reads 4
and writes 2; one operation each: bound by bytes.

    thread i -> numbers i, i + (all threads), ...; the launcher starts a thread a number, up to a few thousand blocks

Bias and rounding serve `linear`: cuBLAS has no bias, and multiplies 16-bit inputs. Widening is rounding's way back. Flat arrays; size 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import ptx
from l1_kernels.carrier import F32_1D, F32_2D, array_type, loader, storer
from l1_kernels.cuda_api import cuda, early

ZERO = np.float32(0)


@cache
def make_add() -> Callable[..., Any]:
    """kernel(x, y): x += y, flat."""

    @early()
    @cuda.jit
    def add(x, y):
        ptx.take_turn()
        for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
            x[i] += y[i]

    return add


@cache
def make_add_bias() -> Callable[..., Any]:
    """kernel(y, bias): y [T, N] += bias [N]."""

    @early()
    @cuda.jit
    def add_bias(y, bias):
        ptx.take_turn()
        width = y.shape[1]
        for i in range(cuda.grid(1), y.shape[0] * width, cuda.gridsize(1)):
            t = i // width
            n = i - t * width
            y[t, n] += bias[n]

    return add_bias


@cache
def make_scale_add_bias() -> Callable[..., Any]:
    """kernel(y, scale, bias, has_bias): y [T, N] = y * scale [N] + bias [N]."""

    @cuda.jit
    def scale_add_bias(y, scale, bias, has_bias):
        width = y.shape[1]
        for i in range(cuda.grid(1), y.shape[0] * width, cuda.gridsize(1)):
            t = i // width
            n = i - t * width
            shift = bias[n] if has_bias else ZERO
            y[t, n] = y[t, n] * scale[n] + shift

    return scale_add_bias


@cache
def make_int8_to_fp16() -> Callable[..., Any]:
    """kernel(numbers, bits): int8 as fp16, which holds it exactly, flat."""
    load, store = loader("int8"), storer("fp16")

    @cuda.jit
    def int8_to_fp16(numbers, bits):
        for i in range(cuda.grid(1), numbers.shape[0], cuda.gridsize(1)):
            bits[i] = store(load(numbers[i]))

    return int8_to_fp16


@cache
def make_round(dtype: str) -> Callable[..., Any]:
    """kernel(x, bits): x in the carrier of `dtype`, flat."""
    store = storer(dtype)

    @early()
    @cuda.jit
    def round_to(x, bits):
        ptx.take_turn()
        for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
            bits[i] = store(x[i])

    return round_to


@cache
def make_widen(dtype: str) -> Callable[..., Any]:
    """kernel(bits, x): the float32 numbers of the carrier of `dtype`, flat."""
    load = loader(dtype)

    @cuda.jit
    def widen(bits, x):
        for i in range(cuda.grid(1), bits.shape[0], cuda.gridsize(1)):
            x[i] = load(bits[i])

    return widen


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    yield "add", make_add(), (F32_1D, F32_1D)
    yield "add_bias", make_add_bias(), (F32_2D, F32_1D)
    yield "scale_add_bias", make_scale_add_bias(), (F32_2D, F32_1D, F32_1D, types.boolean)
    yield "int8_to_fp16", make_int8_to_fp16(), (array_type("int8", 1), array_type("fp16", 1))
    for dtype in ("fp16", "bf16"):
        yield f"round_{dtype}", make_round(dtype), (F32_1D, array_type(dtype, 1))
        yield f"widen_{dtype}", make_widen(dtype), (array_type(dtype, 1), F32_1D)
