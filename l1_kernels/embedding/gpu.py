"""y[t, k] = table[ids[t] - first, k] * scale[ids[t] - first], or 0 where that row is not in the table

table [N, K] (scale [N] for int8), ids int32 [T], y float32 [T, K]: all in global memory.
Reads T*K numbers of 4, 2 or 1 bytes, writes 4*T*K bytes, computes nothing: bound by bytes.

    block t -> token t; its threads walk along k, neighbours side by side (coalesced)

The launcher rejects: a table that is no Weight [N, K], ids that are not int32 [T]. T = 0 launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba import types

from l1_kernels.carrier import DTYPES, F32_1D, F32_2D, I32_1D, array_type, loader
from l1_kernels.cuda_api import cuda


@cache
def make_embed(dtype: str) -> Callable[..., Any]:
    """kernel(table, scale, ids, first, out)[T, threads]; `scale` is read for int8 only."""
    load, scaled = loader(dtype), dtype == "int8"

    @cuda.jit
    def embed(table, scale, ids, first, out):
        t = cuda.blockIdx.x
        row = ids[t] - first
        if 0 <= row and row < table.shape[0]:
            factor = scale[row] if scaled else np.float32(1)
            for k in range(cuda.threadIdx.x, table.shape[1], cuda.blockDim.x):
                out[t, k] = load(table[row, k]) * factor
        else:
            for k in range(cuda.threadIdx.x, table.shape[1], cuda.blockDim.x):
                out[t, k] = np.float32(0)

    return embed


def variants() -> Iterator[tuple[str, Callable[..., Any], tuple[types.Type, ...]]]:
    for dtype in DTYPES:
        yield f"embed_{dtype}", make_embed(dtype), (array_type(dtype, 2), F32_1D, I32_1D, types.int64, F32_2D)
