"""bits[t, f] = round(act(y[t, f] + b[f]));   gated: act(y[t, f] + b[f]) * (y[t, F + f] + b[F + f])

What follows a library's matrix product y float32 [T, N] and stands before the next, in one launch. Everything in global memory;
`bits` is the 16-bit carrier of the next product's dtype. Reads 4 (gated: 8) and writes 2 bytes a number: bound by bytes.

    block (i, j) -> columns i, i + (all threads of the row), ... of the tokens j, j + (all rows of blocks), ...

No launch of its own for the bias, the activation, the rounding: one by one they would read and write 4 bytes a number each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels.activation.gpu import FUNCTIONS, KINDS
from l1_kernels.carrier import F32_1D, F32_2D, array_type, storer
from l1_kernels.cuda_api import cuda

ZERO = np.float32(0)


@cache
def make_activation(dtype: str, kind: str, gated: bool) -> Callable[..., Any]:
    """kernel(y, bias, has_bias, bits): y [T, F] or gated [T, 2F], bias of a row of it, bits [T, F] in the carrier of `dtype`."""
    store, function = storer(dtype), FUNCTIONS[kind]

    @cuda.jit
    def activation(y, bias, has_bias, bits):
        width = bits.shape[1]
        first, step = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.gridDim.x * cuda.blockDim.x
        for t in range(cuda.blockIdx.y, y.shape[0], cuda.gridDim.y):
            for f in range(first, width, step):
                value = function(y[t, f] + (bias[f] if has_bias else ZERO))
                if gated:
                    value *= y[t, width + f] + (bias[width + f] if has_bias else ZERO)
                bits[t, f] = store(value)

    return activation


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    made = [("fp16", kind, gated) for kind in KINDS for gated in (False, True)] + [("bf16", "gelu", False), ("bf16", "silu", True)]
    for dtype, kind, gated in made:
        name = f"activation_{dtype}_{kind}{'_gated' if gated else ''}"
        yield name, make_activation(dtype, kind, gated), (F32_2D, F32_1D, types.boolean, array_type(dtype, 2))
