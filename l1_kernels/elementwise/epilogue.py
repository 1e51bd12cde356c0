"""bits[t, f] = round(act(y[t, f] + b[f]));   gated: act(y[t, f] + b[f]) * (y[t, F + f] + b[F + f])

What follows a library's matrix product y float32 [T, N] and stands before the next, in one launch. Everything in global memory;
`bits` is the 16-bit carrier of the next product's dtype. Reads 4 (gated: 8) and writes 2 bytes a number: bound by bytes.

    block (i, j) -> columns i, i + (all threads of the row), ... of the tokens j, j + (all rows of blocks), ...
    eights       -> eight neighbours a thread in their place, by loads and stores of 16 bytes: F a multiple of 8, all aligned

No launch of its own for the bias, the activation, the rounding: one by one they would read and write 4 bytes a number each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels import ptx
from l1_kernels.activation.gpu import FUNCTIONS, KINDS
from l1_kernels.carrier import F32_1D, F32_2D, array_type, storer
from l1_kernels.cuda_api import cuda, early

ZERO = np.float32(0)
EIGHT = 8  # numbers of a thread's store


@cache
def make_activation(dtype: str, kind: str, gated: bool) -> Callable[..., Any]:
    """kernel(y, bias, has_bias, bits): y [T, F] or gated [T, 2F], bias of a row of it, bits [T, F] in the carrier of `dtype`."""
    store, function = storer(dtype), FUNCTIONS[kind]

    @early()
    @cuda.jit
    def activation(y, bias, has_bias, bits):
        ptx.take_turn()
        width = bits.shape[1]
        first, step = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.gridDim.x * cuda.blockDim.x
        for t in range(cuda.blockIdx.y, y.shape[0], cuda.gridDim.y):
            for f in range(first, width, step):
                value = function(y[t, f] + (bias[f] if has_bias else ZERO))
                if gated:
                    value *= y[t, width + f] + (bias[width + f] if has_bias else ZERO)
                bits[t, f] = store(value)

    return activation


@cuda.jit(device=True, forceinline=True)
def load_eight(y, at, bias, column, has_bias):
    """y[at .. at + 7] + bias[column ..], y by its flat index."""
    a, b, c, d = ptx.load16_floats(y, at)
    e, f, g, h = ptx.load16_floats(y, at + 4)
    if has_bias:
        i, j, k, m = ptx.load16_floats(bias, column)
        n, o, p, q = ptx.load16_floats(bias, column + 4)
        return a + i, b + j, c + k, d + m, e + n, f + o, g + p, h + q
    return a, b, c, d, e, f, g, h


@cache
def make_activation_of_eights(dtype: str, kind: str, gated: bool) -> Callable[..., Any]:
    """`make_activation` for F a multiple of EIGHT and arrays that lie at a multiple of 16 bytes; a thread for EIGHT columns."""
    function, pack = FUNCTIONS[kind], ptx.f32x2_to_bf16x2 if dtype == "bf16" else ptx.f32x2_to_f16x2

    @early()
    @cuda.jit
    def activation_of_eights(y, bias, has_bias, bits):
        ptx.take_turn()
        width, pitch = bits.shape[1], y.shape[1]
        first, step = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.gridDim.x * cuda.blockDim.x
        for t in range(cuda.blockIdx.y, y.shape[0], cuda.gridDim.y):
            for column in range(EIGHT * first, width, EIGHT * step):
                a, b, c, d, e, f, g, h = load_eight(y, t * pitch + column, bias, column, has_bias)
                a, b, c, d = function(a), function(b), function(c), function(d)
                e, f, g, h = function(e), function(f), function(g), function(h)
                if gated:
                    i, j, k, m, n, o, p, q = load_eight(y, t * pitch + width + column, bias, width + column, has_bias)
                    a, b, c, d, e, f, g, h = a * i, b * j, c * k, d * m, e * n, f * o, g * p, h * q
                ptx.store16(bits, t * width + column, (pack(a, b), pack(c, d), pack(e, f), pack(g, h)))

    return activation_of_eights


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    made = [("fp16", kind, gated) for kind in KINDS for gated in (False, True)] + [("bf16", "gelu", False), ("bf16", "silu", True)]
    for dtype, kind, gated in made:
        name, signature = f"{dtype}_{kind}{'_gated' if gated else ''}", (F32_2D, F32_1D, types.boolean, array_type(dtype, 2))
        yield f"activation_{name}", make_activation(dtype, kind, gated), signature
        yield f"activation_of_eights_{name}", make_activation_of_eights(dtype, kind, gated), signature
